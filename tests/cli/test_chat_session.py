"""A conversation without a terminal or a model: turns, commands, mishaps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxcel.cli.chat_input import read_message
from mlxcel.cli.chat_screen import Screen
from mlxcel.cli.chat_session import Session
from mlxcel.errors import ServerRefusal

Lines = Callable[[str], str]


def lines(*texts: str | BaseException) -> Lines:
    """Reads these lines, then there are no more; an exception is raised in its turn."""
    left: Iterator[str | BaseException] = iter(texts)

    def read(prompt: str) -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


class Model:
    """Answers from a list; keeps what it was asked. An exception comes after half an answer."""

    def __init__(self, *answers: str | BaseException, reason: str = "stop") -> None:
        self.asked: list[Any] = []
        self._answers = iter(answers)
        self._reason = reason

    def __call__(
        self, messages: Sequence[Any], on_text: Callable[[str], None], on_thought: Any
    ) -> str:
        self.asked.append(list(messages))
        on_thought("hm")
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            on_text("half")
            raise answer
        on_text(answer)
        return self._reason


def talk(model: Model, *texts: str | BaseException, **options: Any) -> Session:
    session = Session(model, lines(*texts), Screen(), **{"interactive": True, **options})
    session.run()
    return session


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    """Each turn is asked with all before it; thoughts are no part of what was said."""
    model = Model("one", "two")
    session = talk(model, "a", "", "  ", "b", system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert model.asked == [
        [system, user("a")],
        [system, user("a"), assistant("one"), user("b")],
    ]
    assert session.turns == [user("a"), assistant("one"), user("b"), assistant("two")]
    assert capsys.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["hello"], "hello"),
        (['"""one', "two", 'three"""'], "one\ntwo\nthree"),
        (['"""', "one", '"""'], "\none\n"),
        (['"""one"""'], "one"),
        (['say """'], 'say """'),
    ],
)
def test_messages_of_several_lines(given: list[str], expected: str) -> None:
    """Lines between quotes are one message."""
    assert read_message(lines(*given)) == expected


def test_quotes_that_never_end() -> None:
    """The input's end ends them, and nothing is sent."""
    with pytest.raises(EOFError):
        read_message(lines('"""one', "two"))


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """/reset forgets, /system begins anew, /quit ends, others are explained."""
    model = Model("1", "2", "3", "4")
    session = talk(
        model, "a", "/reset", "b", "/system Be odd.", "c", "/system", "d", "/what", "/quit", "e"
    )
    system = {"role": "system", "content": "Be odd."}
    assert model.asked == [[user("a")], [user("b")], [system, user("c")], [user("d")]]
    assert session.turns == [user("d"), assistant("4")]
    assert "/what is no command.\n/reset" in capsys.readouterr().err


def test_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The conversation is written as JSON, again if asked again, never over another's file."""
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("precious")
    commands = [f"/save {mine}", f"/save {other}", f"/save {tmp_path}/no/such", "/save"]
    talk(Model("ö", "2"), "a", *commands, "b", f"/save {mine}", system="s")
    saved = [user("a"), assistant("ö"), user("b"), assistant("2")]
    system = {"role": "system", "content": "s"}
    assert json.loads(mine.read_text(encoding="utf-8")) == {"messages": [system, *saved]}
    assert "ö" in mine.read_text(encoding="utf-8")
    assert other.read_text() == "precious"
    told = capsys.readouterr().err
    assert f"{other} cannot be written (File exists)." in told
    assert "/no/such cannot be written (No such file or directory)." in told
    assert "/save needs the name of a file." in told


def test_an_answer_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The turn is as if never said, the reason is told, and the conversation goes on."""
    model = Model(ServerRefusal("u", 429, "Two wait.", retry_after=3.0), "fine")
    session = talk(model, "a", "b")
    assert session.turns == [user("b"), assistant("fine")]
    out, err = capsys.readouterr()
    assert out == "half\nfine\n"
    assert "Two wait. Try again in 3 s." in err


def test_an_answer_that_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    """What had come stays said."""
    session = talk(Model(KeyboardInterrupt(), "fine"), "a", "b")
    assert session.turns == [user("a"), assistant("half"), user("b"), assistant("fine")]
    assert capsys.readouterr() == ("half\nfine\n", "(stopped)\n")


def test_ctrl_c_while_nothing_is_said() -> None:
    """Is no reason to end."""
    assert talk(Model("1"), KeyboardInterrupt(), "a").turns == [user("a"), assistant("1")]


@pytest.mark.parametrize("error", [ServerRefusal("u", 500, "Oh."), KeyboardInterrupt()])
def test_without_a_person(error: BaseException) -> None:
    """A failure, or Ctrl-C, ends everything."""
    with pytest.raises(type(error)):
        talk(Model(error), "a", "b", interactive=False)
    with pytest.raises(KeyboardInterrupt):
        talk(Model(), KeyboardInterrupt(), interactive=False)


def test_an_answer_that_was_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Is marked as such."""
    talk(Model("on and on", reason="length"), "a")
    assert "(cut off" in capsys.readouterr().err


class Terminal:
    """Standard output that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    return terminal


def test_thoughts_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are dim, and end before the answer begins or is stopped."""
    terminal = on_terminal(monkeypatch)
    screen = Screen()
    for text in ("let me ", "see"):
        screen.thought(text)
    screen.text("Paris.")
    screen.end()
    screen.thought("again\n")
    screen.end()
    assert terminal.text == "\x1b[2mlet me see\x1b[0m\n\nParis.\n\x1b[2magain\n\x1b[0m"


def test_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts are as bright as answers where no one wants escapes."""
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    screen.thought("hm\n")
    screen.text("Paris.")
    screen.end()
    assert terminal.text == "hm\n\nParis.\n"


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters are shown as unknown ones; tabs and line ends stay."""
    terminal = on_terminal(monkeypatch)
    screen = Screen()
    screen.text("a\x1b]0;title\x07b\r\x9b1mc\td\n")
    assert terminal.text == "a\ufffd]0;title\ufffdb\ufffd\ufffd1mc\td\n"
