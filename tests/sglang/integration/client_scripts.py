"""The conversations of `clients.py`: scripts of ten turns, and the client that holds the history.

A script changes the history as a client or its user does, and then asks for an answer. It says
whether the history continues from where the session is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from make_chat_model import WORDS
from tokenizers import Tokenizer

from integration.client_apis import ClientAnswer, TurnOptions

TURNS = 10
TOKENS = 16
QUESTIONS = ("Which ships are in?", "And then, you say?", "", "What was that again, and why?")
PLACE = {"type": "string", "enum": ["quay", "dock"]}
TOOLS: tuple[dict, ...] = tuple(
    {
        "name": name, "description": description, "strict": True,
        "parameters": {
            "type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False,
        },
    }
    for name, description, properties in (
        ("weather", "How it is there", {"place": PLACE}),
        ("tide", "How high it is", {"high": {"type": "boolean"}}),
    )
)
CALL = r'<tool_call>\n\{{"name":"{}", "arguments":\{{"{}":{}\}}\}}\n</tool_call>'
# Two tool calls at once, as the template writes them, and an answer after a thought.
TWO_CALLS = r"\n".join((CALL.format("weather", "place", '"(quay|dock)"'),
                        CALL.format("tide", "high", "(true|false)")))
THOUGHT = r"<think>\n[a-z ]{12,20}\n</think>\n\n[a-z ]{12,20}"
# Stop strings so common that each answer contains one.
STOPS = (" a", " h", " l", " n", " o", " s", " t", " w")


@dataclass(frozen=True)
class Step:
    """A turn, and whether the client edited the history since the turn before."""

    options: TurnOptions
    edited: bool = False


@dataclass
class ScriptedClient:
    """The client's side of a conversation: it holds the history and resends all of it."""

    api: str
    stream: bool
    words: "TokenBiases"
    system: str = "You are the harbour master."
    history: list[dict] = field(default_factory=list)
    answers: list[ClientAnswer] = field(default_factory=list)

    def add_question(self) -> None:
        asked = QUESTIONS[len(self.answers) % len(QUESTIONS)]
        self.history.append({"role": "user", "content": asked})

    def heard(self, answer: ClientAnswer) -> ClientAnswer:
        """Returns the answer without text behind streamed tool calls. The engine's parser leaves it
        out, unless a busy machine's engine streams several tokens at once."""
        return replace(answer, text="") if self.stream and answer.calls else answer

    def add_answer(self, answer: ClientAnswer) -> None:
        """Adds an answer to the history, without its thought, which isn't resent."""
        self.answers.append(answer)
        self.append_answer(answer.text, answer.calls)

    def append_answer(self, text: str, calls: tuple[tuple[str, str], ...]) -> None:
        made: dict = {"role": "assistant", "content": text}
        if calls:
            made["tool_calls"] = [
                {"id": f"call_{len(self.history)}_{number}", "type": "function",
                 "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(calls)
            ]
        self.history.append(made)

    def add_tool_results(self, *texts: str) -> None:
        """Adds a result for each call of the last answer."""
        for call, text in zip(self.history[-1]["tool_calls"], texts, strict=True):
            result = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self.history.append(result)

    def options(self, tokens: int = TOKENS, **more: object) -> TurnOptions:
        """Returns what the client asks for next. Where the API has a logit bias, unstreamed
        answers consist of whole words, which come back as the same tokens, so whole
        conversations can be compared. Streamed answers have no such bias: some of them come back
        as other tokens."""
        bias: dict[str, int] = more.pop("bias", {})
        if not self.stream and not (more.get("regex") or more.get("forced")):
            bias = self.words.partial_words | bias
        # An answer that ends by itself ends with a token without text, which a plain prompt can't
        # resend.
        bias |= self.words.never_end if self.api == "completions" else {}
        return TurnOptions(tokens, bias=bias if self.api in ("chat", "completions") else {}, **more)


class TokenBiases:
    """The chat model's vocabulary, as logit biases."""

    def __init__(self, tokenizer: Tokenizer):
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        end = str(tokenizer.token_to_id("<|im_end|>"))
        self.ends, self.never_end = {end: 100}, {end: -100}
        words = [tokenizer.encode(f" {word}").ids for word in WORDS]
        whole = {ids[0] for ids in words if len(ids) == 1}
        self.partial_words = {str(id): -100 for id in vocabulary.values() if id not in whole}
        # The model must spell these marks: as special tokens they would have no text.
        marks = [tokenizer.token_to_id(mark) for mark in ("<think>", "</think>")]
        self.spelled_thoughts = {str(id): -100 for id in marks}
        # Forbids spaces in calls (the byte level writes them as these characters) and text behind
        # calls.
        spaces = [id for piece, id in vocabulary.items() if set(piece) <= set("ĠĉĊč")]
        self.compact = {str(id): -100 for id in spaces} | self.ends


Script = Callable[[ScriptedClient], Iterator[Step]]


def questions(client: ScriptedClient) -> Iterator[Step]:
    """Plain questions; one is empty, and one gets an empty answer."""
    for number in range(TURNS):
        client.add_question()
        yield Step(client.options(bias=client.words.ends if number == 5 else {}))


def tools(client: ScriptedClient) -> Iterator[Step]:
    """Tool calls, one or two at a time, that the engine's grammar forces and its parser reads,
    and their results."""
    # Only chat has the bias against spaces in a call's arguments. Elsewhere the model may write
    # some, and the parser drops them, so the resent call differs from the session's context.
    spaced = client.api != "chat"
    client.add_question()
    yield Step(client.options(tools=TOOLS))
    client.add_question()
    yield Step(client.options(100, tools=TOOLS, forced=True, bias=client.words.compact))
    assert len(client.answers[-1].calls) == 1, f"calls in {client.answers[-1]}"
    client.add_tool_results("rain")
    yield Step(client.options(tools=TOOLS), edited=spaced)
    client.add_question()
    if client.api == "chat":
        yield Step(client.options(200, tools=TOOLS, regex=TWO_CALLS))
        assert len(client.answers[-1].calls) == 2, f"calls in {client.answers[-1]}"
    else:
        # The other APIs have no regular expressions, so the client replaces the answer by two
        # calls.
        yield Step(client.options(tools=TOOLS))
        client.history.pop()
        two = (("weather", '{"place": "quay"}'), ("tide", '{"high": true}'))
        client.append_answer("Both.", two)
    client.add_tool_results("fog", "it is")
    yield Step(client.options(tools=TOOLS), edited=client.api != "chat")
    client.add_question()
    yield Step(client.options(tools=TOOLS))
    client.add_question()
    yield Step(client.options(100, tools=TOOLS, forced=True, bias=client.words.compact))
    client.add_tool_results("")
    yield Step(client.options(tools=TOOLS), edited=spaced)
    for _ in range(2):
        client.add_question()
        yield Step(client.options(tools=TOOLS))


def edits(client: ScriptedClient) -> Iterator[Step]:
    """Edits of the history: the last answer is asked for again, the system prompt changes, a
    summary replaces the history."""
    for _ in range(3):
        client.add_question()
        yield Step(client.options())
    client.history.pop()
    yield Step(client.options(), edited=True)
    client.add_question()
    yield Step(client.options())
    client.system = f"Now {client.system}"
    client.add_question()
    yield Step(client.options(), edited=True)
    client.add_question()
    yield Step(client.options())
    client.history = [{"role": "user", "content": "All was said, and much of it twice."}]
    yield Step(client.options(), edited=True)
    for _ in range(2):
        client.add_question()
        yield Step(client.options())


def stops_and_thoughts(client: ScriptedClient) -> Iterator[Step]:
    """The session's context has the tokens of a stop string and of a thought; the history
    hasn't."""
    client.add_question()
    yield Step(client.options())
    client.add_question()
    yield Step(client.options(stop=STOPS, bias=client.words.never_end))
    # The messages API reports a stop string as the end of the turn.
    ends = ("stop", "end_turn")
    assert client.answers[-1].finish in ends, f"the end of {client.answers[-1]}"
    client.add_question()
    yield Step(client.options(), edited=True)
    for tokens in (TOKENS, 1, 3):
        client.add_question()
        yield Step(client.options(tokens))
    client.add_question()
    thinks = client.api == "chat"
    spelled = client.words.spelled_thoughts
    yield Step(client.options(100, regex=THOUGHT, bias=spelled) if thinks else client.options())
    assert not thinks or client.answers[-1].thought, f"no thought in {client.answers[-1]}"
    client.add_question()
    yield Step(client.options(), edited=thinks)
    for _ in range(2):
        client.add_question()
        yield Step(client.options())
