"""How worker processes are started and how their ends are told."""

from mlxcel.pipeline.launch import how_it_ended, worker_command


def test_ends_are_told_in_words() -> None:
    """A signal by its name, anything else by its number."""
    assert how_it_ended(-9) == "killed by SIGKILL"
    assert how_it_ended(3) == "exit code 3"


def test_plugins_that_are_left_out_stand_in_the_command() -> None:
    """A worker knows from its start which plugins not to load."""
    assert worker_command(7, ["a", "b"])[-3:] == ["7", "a", "b"]
