"""The ratchet of banned words: their counts in names, messages, docstrings and pages only fall
(tests/support/words.py)."""

import json
import subprocess
import sys

import pytest

from tests.support import words
from tests.support.words import COUNTS, EXCEPTIONS, PLACES, ROOT, WORDS, changed_lines, count, find, lower, problems

NODE = '''"""A node that decodes images."""

def decode(image):
    """Decode an image on all GPUs."""
    # one GPU decodes it alone
    return "The image has "    \\
        f"{image} rows"
'''


@pytest.fixture(scope="module")
def found():
    return find()


@pytest.fixture
def repository(tmp_path):
    """A repository without banned words; write(name, text) changes a file of it."""
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    write("nodes/vae_decode.py", NODE)
    write("README.md", "# A pack\n\nGenerates an image.\n")
    write.root = tmp_path
    return write


def stored():
    return json.loads(COUNTS.read_text(encoding="utf-8"))


def test_counts_of_banned_words_only_fall(found):
    messages = problems(stored(), found)

    assert not messages, "\n".join(problems(stored(), found, changed_lines()))


@pytest.mark.parametrize("place, patterns", [
    ("finished pages", words.FINISHED), ("finished messages", (*words.FINISHED_MESSAGES, *words.UNFINISHED_MESSAGES))])
def test_finished_places_have_no_banned_words(found, place, patterns):
    assert not [each for each in found if each.place == place]
    assert set(stored()[place].values()) == {0}
    assert all(list(ROOT.glob(pattern)) for pattern in patterns)


def test_stored_counts_are_sorted_and_complete():
    text = COUNTS.read_text(encoding="utf-8")

    assert text == json.dumps(stored(), indent=1, sort_keys=True) + "\n"
    assert set(stored()) == set(PLACES)
    assert all(list(counts) == sorted(word.word for word in WORDS) for counts in stored().values())


@pytest.mark.parametrize("path, old, new, place, word, line", [
    ("nodes/vae_decode.py", '"The image', '"The picture', "finished messages", "picture", 6),
    ("nodes/vae_decode.py", "} rows", "} pictures", "finished messages", "picture", 7),
    ("nodes/vae_decode.py", "Decode an image", "Decode a picture", "docstrings and comments", "picture", 4),
    ("nodes/vae_decode.py", "Decode an image", "What decodes an image", "docstrings and comments", words.OPENING, 4),
    ("nodes/vae_decode.py", "# one GPU", "# one card", "docstrings and comments", "card", 5),
    ("nodes/vae_decode.py", "A node that", "Of what", "module docstrings", words.OPENING, 1),
    ("nodes/vae_decode.py", "def decode", "def decodePicture", "names", "picture", 3),
    ("nodes/vae_decode.py", "(image)", "(num_pictures)", "names", "picture", 3),
    ("README.md", "Generates an image.", "Drawn\nfor want\nof a GPU.", "finished pages", "for want of", 4)])
def test_a_new_banned_word_is_reported_with_its_line_and_the_fields_word(repository, path, old, new, place, word, line):
    before = count(find(repository.root))
    assert not any(number for numbers in before.values() for number in numbers.values())
    text = (repository.root / path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    repository(path, text.replace(old, new))
    messages = [message for message in problems(before, find(repository.root)) if f'"{word}"' in message]
    better = next(each.better for each in WORDS if each.word == word)

    assert len(messages) == 1 and messages[0].endswith(f": {path}:{line}")
    assert messages[0].startswith(f'Write {better} instead of "{word}" (1 times in {place}, at most 0 allowed)')


@pytest.mark.parametrize("path, text, places", [
    ("web/panel.js", "/** The card's row. */\nconst label = \"1 picture\";  // beside it\nfind(`${name} forecast`);\n",
     [("docstrings and comments", 1), ("finished messages", 2), ("docstrings and comments", 2),
      ("finished messages", 3)]),
    ("web/zh.js", "export const ZH = {\n  \"The picture\":\n", [("messages", 2)]),
    ("nodes/bridge/vae.py", "text = 'The picture'\n", [("messages", 1)]),
    ("locales/zh/nodeDefs.json", '{\n "tooltip": "The picture"\n}\n', [("finished messages", 2)]),
    ("workflows/Video with sound.json", '{"nodes": [\n{"type": "MarkdownNote", "widgets_values": ["A\\npicture"]},\n'
     '{"type": "Save", "title": "A card", "widgets_values": ["the sound of surf"]}]}',
     [("finished messages", 1), ("finished messages", 2), ("finished messages", 3)]),
    ("docs/guide.md", "# Guide\n\nTwo cards.\n\n```\nstart.py pictures\n```\n`drawn` [page](room.md) alike\n",
     [("finished pages", 3), ("finished pages", 8)]),
    ("web/docs/XDiTNode.md", "A picture.\n", [("finished pages", 1)]),
    ("xdit_backend/vocabulary/__init__.py", "", [("names", 1)]),
    ("xdit_backend/links.py", "x = '# two cards'  # for\n# want of a GPU\n",
     [("docstrings and comments", 1), ("messages", 1)]),
    ("xdit_backend/split.py", "self.pieces = drawn = 1\nfor room in rooms:\n    use(picture, card=1)\n",
     [("names", 1), ("names", 1), ("names", 2)])])
def test_every_kind_of_file_is_read(repository, path, text, places):
    repository(path, text)

    assert sorted((each.place, each.line) for each in find(repository.root)) == sorted(places)


@pytest.mark.parametrize("text", [
    "The model card names the licence.", "a wildcard", "The user unlike a worker", "Sounding board",
    "not for speed but for memory", "Family.amend is called", "run draw() once, see shares.py and greeting.watch()",
    "the key of 40 letters", "what the user has set", "the share of time", "results come from each rank in order",
    "a person, animal or thing", "at most 900 words", "placeholder", "spreadsheet", "Use `forecast_keys_values`."])
def test_good_english_is_left_alone(repository, text):
    repository("docs/guide.md", text)

    assert find(repository.root) == []


@pytest.mark.parametrize("text, word", [
    ("weights that come from host memory", "come"), ("its weights come once", "come"),
    ("keys of the step before", "step before"), ("equal to one device's image", "one device's picture"),
    ("stay in the computer's memory", "computer's memory"),
    ("shared out to ranks", "share"), ("a picture\nin parts", "picture"), ("a person's choice", "person"),
    ("they take\nturns", "take turns"), ("what it says of a layer", "said of"), ("devices are unlike", "unlike"),
    ("an error in words", "words"),
    ("ends with an error, but for rounding", "but for"), ("its use stands in README", "stands in"),
    ("a stand-in for a model", "stand-in"), ("refused by its name", "refused by name"), ("heeds the mask", "heed")])
def test_the_dialect_is_found(repository, text, word):
    repository("docs/guide.md", text)

    assert [each.word for each in find(repository.root)] == [word]


def test_a_fall_has_to_be_stored_and_is_then_the_limit(repository):
    repository("nodes/a.py", "picture = 1\nsmall_picture = 2\n")
    two = count(find(repository.root))
    repository("nodes/a.py", "picture = 1\n")
    one = find(repository.root)

    (message,) = problems(two, one)
    assert "--write" in message and '"picture" occurs 1 times in names, the stored count is 2.' in message
    assert lower(two, count(one)) == count(one)
    assert problems(count(one), one) == []
    assert lower(count(one), two) == count(one), "a count was raised"


def test_write_lowers_counts_and_refuses_to_raise_them(repository, monkeypatch, capsys):
    repository("nodes/a.py", "picture = 1\n")
    counts = count(find(repository.root))
    counts["names"] |= {"picture": 0, "card": 5}
    file = repository.root / "counts.json"
    file.write_text(json.dumps(counts), encoding="utf-8")
    monkeypatch.setattr(words, "COUNTS", file)
    monkeypatch.setattr(words, "find", lambda: find(repository.root))
    monkeypatch.setattr(words, "changed_lines", lambda: set())
    monkeypatch.setattr(sys, "argv", ["words", "--write"])
    with pytest.raises(SystemExit) as end:
        words.main()
    written = json.loads(file.read_text(encoding="utf-8"))["names"]

    assert end.value.code == 1 and "nodes/a.py:1" in capsys.readouterr().out
    assert (written["picture"], written["card"]) == (0, 0)


def test_a_word_that_is_new_in_the_table_starts_at_its_count(repository):
    repository("nodes/a.py", "picture = 1\n")
    found = find(repository.root)
    before = count(found)
    del before["names"]["picture"]

    assert len(problems(before, found)) == 1
    assert lower(before, count(found))["names"]["picture"] == 1


def test_lines_changed_since_the_counts_were_stored_are_listed_first(repository):
    repository("nodes/a.py", "picture = 1\nnew_picture = 2\n")
    found = find(repository.root)
    before = count(found)
    before["names"]["picture"] = 1

    assert problems(before, found, {("nodes/a.py", 2)})[0].endswith(": nodes/a.py:2")
    assert problems(before, found)[0].endswith(": nodes/a.py:1, nodes/a.py:2")


def test_changed_lines_are_those_since_the_commit_that_stored_the_counts(repository):
    def git(*arguments):
        subprocess.run(["git", "-C", str(repository.root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                       check=True, capture_output=True)
    assert changed_lines(repository.root / "docs") == set(), "no folder, no lines"
    repository("tests/support/word_counts.json", "{}\n")
    repository("nodes/a.py", "a = 1\nb = 2\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "Store the counts")
    repository("nodes/a.py", "a = 1\nb = 3\nc = 4\n")
    git("commit", "-am", "Change lines")
    repository("README.md", "# A pack\n\nGenerates a picture.\n")
    repository("nodes/b.py", "d = 5\n")

    assert changed_lines(repository.root) == {("nodes/a.py", 2), ("nodes/a.py", 3), ("README.md", 3), ("nodes/b.py", 1)}


def test_an_exception_is_of_one_word_in_lines_with_its_text(repository):
    repository("nodes/a.py", "# a card of the deck\n# another card\n\n# a picture of the deck\n")
    exceptions = (("nodes/a.py", "card", "deck", "A card game."),)

    assert [(each.word, each.line) for each in find(repository.root, exceptions)] == [("card", 2), ("picture", 4)]


def test_every_exception_is_needed_and_has_a_reason():
    without = {(each.path, each.word, line) for each in find(exceptions=())
               for line in [(ROOT / each.path).read_text(encoding="utf-8").splitlines()[each.line - 1]]} \
        if EXCEPTIONS else set()
    for file, word, text, reason in EXCEPTIONS:
        assert reason and any((file, word) == each[:2] and text in each[2] for each in without), (file, word, text)
