"""Files of settings as names, values and lines, held against bash and against the formats' own readers."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from patience import PATIENCE

from simpletuner.errors import SettingsError
from simpletuner.settings.files.env_format import env_entries
from simpletuner.settings.files.formats import parse_entries, read_entries
from simpletuner.settings.showing.clusters import quoted

BASH = ("bash", "--noprofile", "--norc")
ENVIRONMENT = {"LC_ALL": "C.UTF-8", "E": "of the environment"}
WITH_BASH = hypothesis_settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
TEXT = st.text(st.sampled_from("ab1 \t\n\r'\"\\$`#;&|<>()~*!{}[]=:ä火\x07\x85"), max_size=8)


@st.composite
def words(draw: st.DrawFn) -> str:
    """A word of a shell in parts, each quoted in one of its ways."""
    bare = st.text(st.sampled_from("ab1#=:~*!{}[]ä\\'\"\n "), max_size=3)
    single = TEXT.filter(lambda text: "'" not in text).map(lambda text: f"'{text}'")
    double = TEXT.map(lambda text: f'"{text}"')
    variable = st.sampled_from(["$A", "${A}", '"$A"', '"a${A}b"', "'$A'", "\\$A", "$E", '"$A\\\nB"', "$A\\\nB", "$$A"])
    return "".join(draw(st.lists(st.one_of(bare, single, double, variable, TEXT.map(shlex.quote)), max_size=4)))


def in_bash(text: str, folder: Path) -> dict[str, str] | None:
    """Return the variables A, B and C after bash has read a text as a script; None where it is not happy with it."""
    script = folder / "x.env"
    script.write_bytes(text.encode())
    show = 'set -aeu; . ./x.env; printf "%s\\0" "${A-unset}" "${B-unset}" "${C-unset}"'
    done = subprocess.run([*BASH, "-c", show], cwd=folder, capture_output=True, env=ENVIRONMENT, timeout=PATIENCE)
    if done.returncode or done.stderr:
        return None
    values = done.stdout.decode().split("\0")
    return dict(zip("ABC", values, strict=False))


@example(first="\\", second="", comment=" # it's a $comment", sign="=")  # an escaped blank begins no comment
@given(
    first=words(),
    second=words(),
    sign=st.sampled_from(["=", "+="]),
    comment=st.sampled_from(["", " # it's a $comment", "\t", " ;", ";#"]),
)
@WITH_BASH
def test_pairs_mean_what_they_mean_to_bash_or_are_refused(tmp_path, first, second, comment, sign):
    text = f"# head\nA={first}{comment}\n\n  export B{sign}{second}\nA{sign}{second}$A\nC+=end"
    try:
        entries = list(env_entries(text, ENVIRONMENT))
    except ValueError:
        assume(False)
        raise
    read = {entry.key: entry.value for entry in entries}
    assert dict.fromkeys("ABC", "unset") | read == in_bash(text, tmp_path)


@given(first=TEXT, second=TEXT)
@WITH_BASH
def test_what_is_quoted_for_a_shell_is_read_by_bash_and_by_us(tmp_path, first, second):
    text = f"A={shlex.quote(first)}\nB={shlex.quote(second)} # end\nC=\n"
    expected = {"A": first, "B": second, "C": ""}
    assert in_bash(text, tmp_path) == expected
    assert {entry.key: entry.value for entry in env_entries(text)} == expected


@given(TEXT | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6))
@WITH_BASH
def test_a_word_on_one_line_is_what_bash_reads(word):
    on_one_line = quoted(word)
    assert on_one_line.isprintable()
    shown = subprocess.run([*BASH, "-c", f"printf %s {on_one_line}"], capture_output=True, env={"LC_ALL": "C"})
    assert shown.stdout == word.encode()


@pytest.mark.parametrize(
    "word",
    [
        "a\\\nb",
        '"a\\\nb"',
        '"a\\\\\nb"',
        '"a\\$b\\`\\"\\\\c\\d"',
        "'a\\\nb'",
        "a#b",
        "#",
        "'a'\"b\"c\\ d",
        "\\#",
        "a~b",
        "~",
        "~/x",
        "~/'x y'",
        "'~/x'",
    ],
)
def test_each_way_to_quote_means_what_it_means_to_bash(tmp_path, word):
    text = f"A={word}\nB=end"
    read = {entry.key: entry.value for entry in env_entries(text)}
    assert read | {"C": "unset"} == in_bash(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1\nB=$HOME/x", "line 2: $HOME is set neither in an earlier line nor in the environment"),
        ('A="${X}"\nX=1', "line 1: $X is set neither"),
        (
            "A=${X:-y}",
            "line 1: only $NAME and ${NAME} are replaced here: write the value itself, or put `$` in single",
        ),
        ('A="${X:-a b}"', "line 1: only $NAME"),
        ("A=${X:-a b}", "line 1: only $NAME"),
        ("A=$1", "line 1: only $NAME"),
        ("A=1\nB=`date`", "line 2: commands in `$(...)` or backticks are not run here: write the value itself"),
        ("B=`date +%s`", "line 1: commands in"),
        ("B=$(date +%s)", "line 1: commands in"),
        ('B="a$(date +%s)"', "line 1: commands in"),
        ("A=/x:~/y", "line 1: only `~` or `~/` at the start of a value is replaced here: write the folder itself"),
        ("A=~nobody/x", "line 1: only `~`"),
        ("A=a b", "line 1: a line is NAME=value"),
        ("A='x\n", "line 1: a line is NAME=value"),
        ("\n\nA=a&b", "line 3: a line is NAME=value"),
        ("A = 1", "line 1: a line is NAME=value"),
        ("seed", "line 1: a line is NAME=value"),
        ("A=1; B=2", "line 1: a line is NAME=value"),
        ("if x; then\n", "line 1: this line is a command, and only assignments are read"),
        ("A=1\nsource .venv/bin/activate\n", "line 2: this line is a command"),
    ],
)
def test_what_only_a_shell_could_understand_is_refused_with_its_line(text, said):
    with pytest.raises(ValueError, match="line") as caught:
        list(env_entries(text, {}))
    assert str(caught.value).startswith(said)


def test_a_value_that_extends_an_earlier_one_takes_its_place_and_the_environment_is_not_shown():
    text = "A=1\nB=$A/$TOKEN\nA+=2\nC='$A'\nB=${B}3\nA=4\nD+=$TOKEN\nTOKEN+=5\n"
    found = [(entry.key, entry.value, entry.line, entry.written) for entry in env_entries(text, {"TOKEN": "secret"})]
    assert found == [
        ("A", "12", 3, None),
        ("C", "$A", 4, None),
        ("B", "1/secret3", 5, "1/$TOKEN3"),
        ("A", "4", 6, None),
        ("D", "secret", 7, "$TOKEN"),
        ("TOKEN", "secret5", 8, "$TOKEN5"),
    ]


LINES = {
    "a.json": '{\n  "seed": 1,\n  "deepspeed_config": {\n    "crop": {"seed": [1,\n 2]}\n  },\n  "crop": "a \\" { [",\n'
    '\n  "note: \\"x\\"" : "seed: 2" }',
    "a.toml": '# seed = 0\nseed = 1\ncrop = """\nnote = 3\nseed = 4\n"""\nnote = [\n  "seed",\n  "x = 1",\n]\n'
    "[deepspeed_config]\nseed = 3\n",
    "a.yaml": '---\n# seed: 0\nseed: 1\ncrop: |\n  note: 3\n  seed: 4\n"note": >-\n  x\n\n  y\ndeepspeed_config:\n'
    "  crop: {seed: 3,\n    note: 2}\n",
    "a.env": "# seed=0\nexport seed=1 # x\n\ncrop='\nnote=3\nseed=4\n'\nnote=\"a\n\"b#c\n\ndeepspeed_config='{}'\n",
}
WHERE = {
    "a.json": {"seed": 2, "deepspeed_config": 3, "crop": 7, 'note: "x"': 9},
    "a.toml": {"seed": 2, "crop": 3, "note": 7, "deepspeed_config": 11},
    "a.yaml": {"seed": 3, "crop": 4, "note": 7, "deepspeed_config": 11},
    "a.env": {"seed": 2, "crop": 4, "note": 8, "deepspeed_config": 11},
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("head", ["", "\ufeff"], ids=["plain", "bom"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_every_name_stands_on_its_line(tmp_path, name, head, line_end):
    path = tmp_path / name
    path.write_bytes((head + LINES[name].replace("\n", line_end)).encode())
    assert {entry.key: entry.line for entry in read_entries(path)} == WHERE[name]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.toml", 'crop = "\x85 \u2028"\nseed = 1\n', [1, 2]),
        ("a.toml", 'deepspeed_config.a = 1\ndeepspeed_config.b = 2\n"seed" = 1\n', [1, 3]),
        ("a.toml", "[[deepspeed_config]]\na = 1\n", [1]),
        ("a.toml", '\n"a\\u001b\\"b" = 1\n["c\\n"]\n', [2, 3]),
        ("a.yaml", "{seed: 1,\n crop: 2}", [1, 2]),
        ("a.json", '{"seed":\n1, "crop"\n:2}', [1, 2]),
        ("a.json", "{}", []),
        ("a.yaml", "# nothing\n", []),
        ("a.toml", "", []),
        ("a.env", "\n# x\n", []),
    ],
)
def test_unusual_layouts_keep_their_lines(tmp_path, name, text, lines):
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert [entry.line for entry in read_entries(path)] == lines


JSON_VALUES = st.none() | st.integers() | TEXT | st.lists(TEXT, max_size=2) | st.dictionaries(TEXT, TEXT, max_size=2)


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4))
@WITH_BASH
def test_each_json_name_gets_the_line_that_its_text_has(tmp_path, values):
    path = tmp_path / "a.json"
    path.write_text("{" + ",".join(f"\n{json.dumps(key)} : {json.dumps(value)}" for key, value in values.items()) + "}")
    entries = read_entries(path)
    assert [(entry.key, entry.value) for entry in entries] == list(values.items())
    assert [entry.line for entry in entries] == [2 + index for index in range(len(values))]


def test_names_given_twice_are_all_kept(tmp_path):
    for name, text in {
        "a.json": '{"seed": 1,\n"seed": 2}',
        "a.yaml": "seed: 1\nseed: 2",
        "a.env": "seed=1\nseed=2",
    }.items():
        (tmp_path / name).write_text(text)
        assert [entry.line for entry in read_entries(tmp_path / name)] == [1, 2], name


def test_a_suffix_that_is_no_format_is_named(tmp_path):
    (tmp_path / "a.ini").write_text("seed=1")
    with pytest.raises(SettingsError, match=r"settings are read from \.json, \.toml, \.yaml, \.yml, \.env files"):
        read_entries(tmp_path / "a.ini")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "a: 1\nb:\n  # deep\n  c: 2\n  d: {e: 3}\n"),
        ("c.json", '{"a": 1,\n "b": {\n\n "c": 2,\n "d": {"e": ["f", {"g": 1}]}}}'),
    ],
)
def test_names_inside_a_value_have_their_lines(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    first, second = read_entries(path)
    assert (first.line, first.inner_lines) == (1, {})
    assert (second.line, second.inner_lines) == (2, {"c": 4, "d": 5})


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".toml", ".env"])
def test_a_file_of_very_many_names_is_refused_before_each_is_looked_up(suffix: str):
    lines = {".json": '"n{0}": 1', ".yaml": "n{0}: 1", ".toml": "n{0} = 1", ".env": "N{0}=1"}[suffix]
    rows = [lines.format(number) for number in range(20_000)]
    text = "{" + ",\n".join(rows) + "}" if suffix == ".json" else "\n".join(rows)
    with pytest.raises(SettingsError, match="a file of settings has at most 2,000 names"):
        parse_entries(Path(f"run{suffix}"), text)


def test_merges_that_multiply_are_refused():
    names = ", ".join(f"n{number}: {number}" for number in range(500))
    text = f"a: &a {{{names}}}\n" + "".join(f"b{number}:\n  <<: [*a, *a, *a, *a]\n" for number in range(1900))
    with pytest.raises(SettingsError, match="with its aliases written out it has more than 300,000 names"):
        parse_entries(Path("run.yaml"), text)
