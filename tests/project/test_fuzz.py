"""A few of what tests.programs.fuzz draws: malformed messages and mutated model files are refused in words; and what
must not be is told."""

from tests.programs import fuzz
from tests.support.tiers import FEW_FAMILIES
from tests.support.tiny_checkpoints import families


def test_malformed_messages_and_mutated_files_are_refused_in_words():
    options = fuzz.arguments(["--seed", "7", "--messages", "200", "--headers", "105", "--faults", "0"])

    rows = fuzz.run(options, families_drawn=sorted({*families()} & FEW_FAMILIES))

    print(fuzz.table(rows))
    assert not [words for row in rows for words in row.wrong]
    counts = {row.what: row.count for row in rows}
    assert counts["messages"] == 100 and counts["frames on a connection"] == 20
    assert counts["hostile files"] == len(fuzz.HOSTILE)
    assert sum(count for what, count in counts.items() if what.startswith("mutated")) == 105
    # mutations reach the model behind the header
    assert sum(row.accepted for row in rows if row.what.startswith("mutated")) > 0


def test_what_must_not_be_is_told_and_fails_the_command(monkeypatch, capsys):
    def raw(path):
        raise KeyError("norm_type")
    monkeypatch.setattr(fuzz, "open_checkpoint", raw)
    monkeypatch.setattr(fuzz, "HOSTILE", {"one name often": None})
    monkeypatch.setattr(fuzz, "arguments", lambda: fuzz.argparse.Namespace(seed=0, messages=0, headers=1, faults=0))
    monkeypatch.setattr(fuzz.logging, "disable", lambda: None)

    assert fuzz.main() == 1

    printed = capsys.readouterr().out
    assert "WRONG one name often: KeyError: 'norm_type'" in printed and "| 1     |" in printed
