"""The conversations of `clients.py`: scripts of ten turns, and the client that holds the history.

A script changes the history as a client or its user does, and then asks for an answer. It says
whether the history continues from where the session is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from make_chat_model import WORDS
from tokenizers import Tokenizer

from integration.client_apis import Ask, Said
from integration.runner import equal, one_of

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

    ask: Ask
    edited: bool = False


@dataclass
class Talk:
    """The client's side of a conversation: it holds the history and resends all of it."""

    api: str
    stream: bool
    words: "Words"
    system: str = "You are the harbour master."
    history: list[dict] = field(default_factory=list)
    answers: list[Said] = field(default_factory=list)

    def says(self) -> None:
        asked = QUESTIONS[len(self.answers) % len(QUESTIONS)]
        self.history.append({"role": "user", "content": asked})

    def heard(self, said: Said) -> None:
        """Adds an answer to the history, without its thought, which isn't resent."""
        self.answers.append(said)
        self.answers_with(said.text, said.calls)

    def answers_with(self, text: str, calls: tuple[tuple[str, str], ...]) -> None:
        made: dict = {"role": "assistant", "content": text}
        if calls:
            made["tool_calls"] = [
                {"id": f"call_{len(self.history)}_{number}", "type": "function",
                 "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(calls)
            ]
        self.history.append(made)

    def results(self, *texts: str) -> None:
        """Adds a result for each call of the last answer."""
        for call, text in zip(self.history[-1]["tool_calls"], texts, strict=True):
            result = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self.history.append(result)

    def asks(self, tokens: int = TOKENS, **more: object) -> Ask:
        """Returns what the client asks for next. Where the API has a logit bias, unstreamed
        answers consist of whole words, which come back as the same tokens, so whole
        conversations can be compared. Streamed answers have no such bias: some of them come back
        as other tokens."""
        bias: dict[str, int] = more.pop("bias", {})
        if not self.stream and not (more.get("regex") or more.get("forced")):
            bias = self.words.pieces | bias
        # An answer that ends by itself ends with a token without text, which a plain prompt can't
        # resend.
        bias |= self.words.never_end if self.api == "completions" else {}
        return Ask(tokens, bias=bias if self.api in ("chat", "completions") else {}, **more)


class Words:
    """The chat model's vocabulary, as logit biases."""

    def __init__(self, tokenizer: Tokenizer):
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        end = str(tokenizer.token_to_id("<|im_end|>"))
        self.ends, self.never_end = {end: 100}, {end: -100}
        words = [tokenizer.encode(f" {word}").ids for word in WORDS]
        whole = {ids[0] for ids in words if len(ids) == 1}
        self.pieces = {str(id): -100 for id in vocabulary.values() if id not in whole}
        # The model must spell these marks: as special tokens they would have no text.
        marks = [tokenizer.token_to_id(mark) for mark in ("<think>", "</think>")]
        self.spelled_thoughts = {str(id): -100 for id in marks}
        # Forbids spaces in calls (the byte level writes them as these characters) and text behind
        # calls.
        spaces = [id for piece, id in vocabulary.items() if set(piece) <= set("ĠĉĊč")]
        self.compact = {str(id): -100 for id in spaces} | self.ends


Script = Callable[[Talk], Iterator[Step]]


def questions(talk: Talk) -> Iterator[Step]:
    """Plain questions; one is empty, and one gets an empty answer."""
    for number in range(TURNS):
        talk.says()
        yield Step(talk.asks(bias=talk.words.ends if number == 5 else {}))


def tools(talk: Talk) -> Iterator[Step]:
    """Tool calls, one or two at a time, that the engine's grammar forces and its parser reads,
    and their results."""
    # Only chat has the bias against spaces in a call's arguments. Elsewhere the model may write
    # some, and the parser drops them, so the resent call differs from the session's context.
    spaced = talk.api != "chat"
    talk.says()
    yield Step(talk.asks(tools=TOOLS))
    talk.says()
    yield Step(talk.asks(100, tools=TOOLS, forced=True, bias=talk.words.compact))
    equal(len(talk.answers[-1].calls), 1, f"calls in {talk.answers[-1]}")
    talk.results("rain")
    yield Step(talk.asks(tools=TOOLS), edited=spaced)
    talk.says()
    if talk.api == "chat":
        yield Step(talk.asks(200, tools=TOOLS, regex=TWO_CALLS))
        equal(len(talk.answers[-1].calls), 2, f"calls in {talk.answers[-1]}")
    else:
        # The other APIs have no regular expressions, so the client replaces the answer by two
        # calls.
        yield Step(talk.asks(tools=TOOLS))
        talk.history.pop()
        two = (("weather", '{"place": "quay"}'), ("tide", '{"high": true}'))
        talk.answers_with("Both.", two)
    talk.results("fog", "it is")
    yield Step(talk.asks(tools=TOOLS), edited=talk.api != "chat")
    talk.says()
    yield Step(talk.asks(tools=TOOLS))
    talk.says()
    yield Step(talk.asks(100, tools=TOOLS, forced=True, bias=talk.words.compact))
    talk.results("")
    yield Step(talk.asks(tools=TOOLS), edited=spaced)
    for _ in range(2):
        talk.says()
        yield Step(talk.asks(tools=TOOLS))


def edits(talk: Talk) -> Iterator[Step]:
    """Edits of the history: the last answer is asked for again, the system prompt changes, a
    summary replaces the history."""
    for _ in range(3):
        talk.says()
        yield Step(talk.asks())
    talk.history.pop()
    yield Step(talk.asks(), edited=True)
    talk.says()
    yield Step(talk.asks())
    talk.system = f"Now {talk.system}"
    talk.says()
    yield Step(talk.asks(), edited=True)
    talk.says()
    yield Step(talk.asks())
    talk.history = [{"role": "user", "content": "All was said, and much of it twice."}]
    yield Step(talk.asks(), edited=True)
    for _ in range(2):
        talk.says()
        yield Step(talk.asks())


def stops_and_thoughts(talk: Talk) -> Iterator[Step]:
    """The session's context has the tokens of a stop string and of a thought; the history
    hasn't."""
    talk.says()
    yield Step(talk.asks())
    talk.says()
    yield Step(talk.asks(stop=STOPS, bias=talk.words.never_end))
    # The messages API reports a stop string as the end of the turn.
    ends = ("stop", "end_turn")
    one_of(talk.answers[-1].finish, ends, f"the end of {talk.answers[-1]}")
    talk.says()
    yield Step(talk.asks(), edited=True)
    for tokens in (TOKENS, 1, 3):
        talk.says()
        yield Step(talk.asks(tokens))
    talk.says()
    thinks = talk.api == "chat"
    spelled = talk.words.spelled_thoughts
    yield Step(talk.asks(100, regex=THOUGHT, bias=spelled) if thinks else talk.asks())
    assert not thinks or talk.answers[-1].thought, f"no thought in {talk.answers[-1]}"
    talk.says()
    yield Step(talk.asks(), edited=thinks)
    for _ in range(2):
        talk.says()
        yield Step(talk.asks())
