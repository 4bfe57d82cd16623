"""Writes the token ids that SGLang makes of chats, which the router's tests compare with.

    venv/bin/python tests/sglang/prompts.py          writes model and prompts.json in tests/data
    venv/bin/python tests/sglang/prompts.py --check  exits 1 if prompts.json would change

It runs SGLang's own protocol and template code with a tokenizer of our own, and no engine. Each
case has its name, the template's name, a request's body, and the token ids that the engine
computes; the ids are null if the template refuses the chat.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

DATA = Path(__file__).parent.parent / "data"
MARKS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
WORDS = (
    "the session keeps its turns on the worker that holds the pages of its prompt, and "
    "a tool that was called answers with what it found: user, assistant, system, function, "
    '{"name": "look", "arguments": {"path": "src/main.rs", "line": 12}} é ü 漢字 🙂 \n\n  1234567 '
)
# The pattern by which GPT-like models split a text before they look for merges.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATES = {
    "chatml": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool>\\n' + content + '\\n</tool>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "parts": """\
{{ bos_token }}{% macro show(content) %}
{% if content is string %}{{ content | trim }}{% else %}{% for part in content %}{% if part['type'] == 'text' %}{{ part['text'] | trim }};{% endif %}{% endfor %}{% endif %}
{% endmacro %}
{% for message in messages %}
  {% for item in message.content if message.content is not string %}{% endfor %}
  {% if message['role'] not in ['user', 'system', 'assistant', 'tool', 'developer'] %}
    {{ raise_exception('Unknown role ' + message['role']) }}
  {% endif %}
[{{ message['role'] | upper }} {{ loop.index }}/{{ loop.length }}{% if message.name is defined %} as {{ message.name }}{% endif %}] {{ show(message['content']) -}}
  {% for call in message.tool_calls or [] %}
    {% for key, value in call.function.arguments.items() %}
{{ call.id }}.{{ key }}={{ value }}{{ ', ' if not loop.last }}
    {% endfor %}
  {% endfor %}
{{- eos_token }}
{% endfor %}
{% if tools is not none %}
{{ tools | tojson(indent=2) }}
{% endif %}
{% if reasoning_effort %}{{ 'effort ' ~ reasoning_effort }}{% endif %}
{% generation %}{{ '[ASSISTANT]' if add_generation_prompt }}{% endgeneration %}
""",
    "plain": """\
{% for message in messages %}{% if loop.index0 % 2 == 1 and message['role'] == 'user' %}{% break %}{% endif %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
}

TOOLS = [
    {"type": "function", "function": {
        "name": "look", "description": 'Looks at "a" file\n<here> & there',
        "parameters": {"type": "object", "properties": {
            "path": {"type": "string"}, "at": {"type": "number", "default": 1.0, "minimum": -2.5e-7},
            "far": {"const": 1e22}}, "required": ["path"], "additionalProperties": False}}},
    {"type": "function", "function": {
        "parameters": {"type": "object", "properties": {}}, "strict": True, "name": "list",
        "x-ignored": 1}},
]
CALL = {"id": "c1", "type": "function",
        "function": {"name": "look", "arguments": '{"path": "a\\u00e9", "at": 2, "all": [true, null, "\'x\'"]}'}}
CHATS = {
    "one": {"messages": [{"role": "user", "content": "hello"}]},
    "system": {"messages": [
        {"role": "system", "content": "You  are\n\nterse. "}, {"role": "user", "content": " hi there\n"}]},
    "unicode": {"messages": [{"role": "user", "content": "é ü 漢字 🙂 \u200d\u0301 \t\r\n tabs\\n 'll 12345"}]},
    "empty": {"messages": [
        {"role": "user", "content": ""}, {"role": "assistant", "content": None},
        {"role": "user", "content": "again"}]},
    "marks": {"messages": [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb <think>c</think><|bos"}]},
    "tools": {"tools": TOOLS, "messages": [
        {"role": "System", "content": "s"}, {"role": "user", "content": "look", "name": "dropped"}]},
    "no_tools": {"tools": TOOLS, "tool_choice": "none", "messages": [{"role": "user", "content": "u"}]},
    "one_tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "list"}},
                 "messages": [{"role": "user", "content": "u"}]},
    "calls": {"tools": TOOLS, "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "well", "tool_calls": [CALL, {**CALL, "id": "c2"}], "junk": 1},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "and?"}]},
    "thought": {"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"}]},
    "parts": {"messages": [
        {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
        {"role": "user", "content": "four"}]},
    "assistant_last": {"messages": [
        {"role": "user", "content": "begin"}, {"role": "assistant", "content": "mid", "name": "x"}]},
    "quiet": {"chat_template_kwargs": {"enable_thinking": False}, "messages": [{"role": "user", "content": "u"}]},
    "effort": {"reasoning_effort": "low", "messages": [{"role": "user", "content": "u"}]},
    "named": {"messages": [
        {"role": "developer", "content": "d", "name": "boss"}, {"role": "user", "content": "u"}]},
}
TEXTS = ["hello", "", " two  spaces\n\n", "<|im_start|>user\nhi<|im_end|>", "漢字 é 1234567 don't"]


def make_tokenizer(folder: Path) -> None:
    made = Tokenizer(BPE())
    made.pre_tokenizer = Sequence([
        Split(Regex(PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = ByteLevelDecoder()
    alphabet = sorted(ByteLevel.alphabet())
    made.train_from_iterator(
        [WORDS] * 3, BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKS[:4]])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS[4:]])
    bos = MARKS[0]
    made.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, made.token_to_id(bos))])
    made.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": MARKS[0],
        "eos_token": {"content": MARKS[1], "special": True, "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATES["chatml"])


def serving(tokenizer, template: str) -> OpenAIServingChat:
    """Returns SGLang's own chat serving code, with nothing of an engine behind it but a
    tokenizer."""
    tokenizer.chat_template = template
    made = OpenAIServingChat.__new__(OpenAIServingChat)
    made.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, served_model_name="m")
    made.template_manager = SimpleNamespace(
        chat_template_name=None, python_chat_template=None, reasoning_config=None,
        jinja_template_content_format=detect_jinja_template_content_format(template),
        jinja_template_may_reorder_tool_results=False)
    made.chat_encoding_spec = made._encoding_adapter = None
    made.is_minimax_m3 = False
    made._tokenizer_auto_adds_specials = len(tokenizer.encode("")) > 0
    made._prompt_text_round_trip_is_lossy = False
    made._reasoning_detector = made.reasoning_parser = made.tool_call_parser = None
    return made


def chat_ids(engine: OpenAIServingChat, body: dict) -> list[int] | None:
    request = ChatCompletionRequest(**{"model": "m", **body})
    tools = None
    if request.tools and request.tool_choice != "none":
        tools = [
            tool.model_dump() for tool in request.tools
            if isinstance(request.tool_choice, str)
            or tool.function.name == request.tool_choice.function.name]
    try:
        return list(engine._apply_jinja_template(request, tools, False).prompt_ids)
    except ValueError:
        return None


def cases(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for template, source in TEMPLATES.items():
        for name, body in CHATS.items():
            engine = serving(tokenizer, source)
            yield {"case": f"{template}/{name}", "template": template, "body": body,
                   "ids": chat_ids(engine, json.loads(json.dumps(body)))}
    for text in TEXTS:
        yield {"case": f"text {text!r}", "template": None, "body": {"text": text},
               "ids": tokenizer(text)["input_ids"]}


def written(folder: Path) -> str:
    lines = [json.dumps(case, ensure_ascii=False) for case in cases(folder)]
    return json.dumps(TEMPLATES)[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        same = (DATA / "prompts.json").read_text() == written(DATA / "model")
        print(
            "SGLang makes the same prompts" if same else
            "tests/data/prompts.json is not what SGLang makes; prompts.py without --check writes it"
        )
        return 0 if same else 1
    (DATA / "model").mkdir(parents=True, exist_ok=True)
    make_tokenizer(DATA / "model")
    (DATA / "prompts.json").write_text(written(DATA / "model"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
