"""Parser `markers`: numbers, headings, 第一步, opening words, paragraphs, sub-steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slea_llm import assets
from slea_llm.errors import ConfigError
from slea_llm.parsers.markers import MarkersParser
from slea_llm.parsers.sentences import sentence_cuts
from slea_llm.parsers.vocabulary import Kinds, Markers, number_of
from slea_llm.types import Step, Turn, leaf_steps


def parse(text: str, **options: Any) -> tuple[Step, ...]:
    parser = MarkersParser(MarkersParser.Config(kinds=None, **options))
    return parser.parse(Turn(index=0, context=(), text=text), "t", None)


def leaves(text: str, **options: Any) -> list[str]:
    return [leaf.text.strip() for leaf in leaf_steps(parse(text, **options))]


def tops(text: str, **options: Any) -> list[tuple[str, str | None]]:
    return [(step.text.strip(), step.label) for step in parse(text, **options) if step.parent is None]


@pytest.mark.parametrize(
    ("text", "name", "steps"),
    [
        ("1. Ask dish.\n2. Ask address.", "numbered_dot", ["1. Ask dish.", "2. Ask address."]),
        ("1) Ask dish\n2) Ask address", "numbered_paren", ["1) Ask dish", "2) Ask address"]),
        ("a) Ask dish\nb) Ask address", "lettered", ["a) Ask dish", "b) Ask address"]),
        ("(1) Ask dish\n(2) Ask address", "ascii_paren_number", ["(1) Ask dish", "(2) Ask address"]),
        ("ii. Ask dish\niii. Ask address", "roman", ["ii. Ask dish", "iii. Ask address"]),
        ("- Ask dish\n- Ask address", "bullet", ["- Ask dish", "- Ask address"]),
        ("Step 1: Ask dish. Step 2: Ask address.", "step_n_colon", ["Step 1: Ask dish.", "Step 2: Ask address."]),
        ("**Step 1:** Ask dish.\n**Step 2:** Go.", "step_n_colon", ["**Step 1:** Ask dish.", "**Step 2:** Go."]),
        ("Step one - ask dish\nStep two - go", "step_n", ["Step one - ask dish", "Step two - go"]),
        ("Thought 1: a is b\nThought 2: c is d", "thought_n_colon", ["Thought 1: a is b", "Thought 2: c is d"]),
        ("第一步：问菜名。第二步：问地址。", "zh_diyibu", ["第一步：问菜名。", "第二步：问地址。"]),
        ("步骤1：问菜名。\n步骤2：问地址。", "zh_buzhou_n", ["步骤1：问菜名。", "步骤2：问地址。"]),
        ("步骤一：问菜名\n步骤二：问地址", "zh_buzhou_n", ["步骤一：问菜名", "步骤二：问地址"]),
        ("1、问菜名\n2、问地址", "zh_dunhao_number", ["1、问菜名", "2、问地址"]),
        ("一、问菜名\n二、问地址", "zh_dunhao_number", ["一、问菜名", "二、问地址"]),
        ("①问菜名；②问地址。", "circled_number", ["①问菜名；", "②问地址。"]),
        ("（1）问菜名\n（2）问地址", "zh_paren_number", ["（1）问菜名", "（2）问地址"]),
        ("## Plan A\nGo there.\n## Plan B\nStay.", "markdown_heading", ["## Plan A\nGo there.", "## Plan B\nStay."]),
    ],
)
def test_marked_steps(text: str, name: str, steps: list[str]) -> None:
    assert tops(text) == [(step, name) for step in steps]
    assert leaves(text) == steps
    assert tops(f"<think>{text}</think>")[0][0].startswith("<think>" + steps[0][:6])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("首先，查订单。其次，问地址。最后，退款。", ["首先，查订单。", "其次，问地址。", "最后，退款。"]),
        ("先查订单。接下来，再退款！好吗？", ["先查订单。", "接下来，再退款！好吗？"]),
        (
            "First look it up. It is long. Then ask. So done.",
            ["First look it up. It is long.", "Then ask.", "So done."],
        ),
        ("It is 5. Wait, no. But maybe.", ["It is 5.", "Wait, no.", "But maybe."]),
        ("Look here.\n\nThere is more.\nAnd on it\ngoes.", ["Look here.", "There is more.", "And on it\ngoes."]),
        ("I see it as in step 2: done, and 第一步 too.", ["I see it as in step 2: done, and 第一步 too."]),
        ("Version 2. 5 is 3.5 kg", ["Version 2.", "5 is 3.5 kg"]),
        ("No, said (1) and (2).", ["No, said (1) and (2)."]),
    ],
)
def test_moves_and_paragraphs(text: str, steps: list[str]) -> None:
    found = leaves(text, sentences=text.startswith("Version"))
    assert found == steps


def test_an_outline_has_sub_steps_and_a_title_goes_with_what_is_under_it() -> None:
    text = (
        "# Order\nIntro of it.\n1. Ask the dish.\n   - hot\n   - cold\n2. Ask the address.\n\n"
        "More about two.\n3. Place it.\n\n## Later\nFirst wait. Then go."
    )
    steps = parse(text, whole_up_to=0)
    depths: dict[int, int] = {}
    shown = []
    for step in steps:
        depths[step.index] = 0 if step.parent is None else depths[step.parent] + 1
        shown.append((depths[step.index], step.text.strip().split("\n")[0], step.label))
    assert shown == [
        (0, "# Order", "markdown_heading"),
        (1, "# Order", "paragraph"),
        (1, "1. Ask the dish.", "numbered_dot"),
        (2, "1. Ask the dish.", "numbered_dot"),
        (2, "- hot", "bullet"),
        (2, "- cold", "bullet"),
        (1, "2. Ask the address.", "numbered_dot"),
        (2, "2. Ask the address.", "numbered_dot"),
        (2, "More about two.", "paragraph"),
        (1, "3. Place it.", "numbered_dot"),
        (1, "## Later", "markdown_heading"),
        (2, "## Later", "first_next"),
        (2, "Then go.", "first_next"),
    ]


def test_a_short_marked_step_stays_as_it_was_written_and_a_long_one_gets_sub_steps() -> None:
    text = "1. Look. Then ask.\n   - a\n   - b\n2. Done."
    assert len(leaves(text)) == 2
    assert leaves(text, whole_up_to=20) == ["1. Look. Then ask.", "- a", "- b", "2. Done."]
    assert leaves(text, sentences=True) == ["1. Look.", "Then ask.", "- a", "- b", "2. Done."]


def test_a_paragraph_between_two_numbers_belongs_to_the_first() -> None:
    text = "1. Ask.\n\nIt is late.\n\n2. Go.\n\nThat is all."
    assert tops(text) == [
        ("1. Ask.\n\nIt is late.", "numbered_dot"),
        ("2. Go.", "numbered_dot"),
        ("That is all.", "paragraph"),
    ]


def test_a_number_alone_is_no_list() -> None:
    assert leaves("（1）看题。\n所以选B。") == ["（1）看题。", "所以选B。"]
    assert leaves("（1）看题。\n所以选B。\n（2）看图。") == ["（1）看题。\n所以选B。", "（2）看图。"]


@pytest.mark.parametrize("options", [{}, {"sentences": True}])
def test_br_063_points_in_versions_addresses_and_prices_end_no_sentence(options: dict[str, bool]) -> None:
    text = "Use v4.0.7 from https://ex.test/a.b?q=1.5 now. Pay $3.50 to pay@ex.test. Done!"
    cuts = [0, *sentence_cuts(text), len(text)]
    expected = ["Use v4.0.7 from https://ex.test/a.b?q=1.5 now.", "Pay $3.50 to pay@ex.test.", "Done!"]
    assert [text[a:b].strip() for a, b in zip(cuts[:-1], cuts[1:], strict=True)] == expected  # noqa: RUF007
    assert "".join(leaf.text for leaf in leaf_steps(parse(text, **options))) == text
    if options:
        assert leaves(text, **options) == expected


def test_br_065_chinese_stops_end_a_sentence_without_white_space() -> None:
    assert leaves("先查订单。再退款！好吗？", sentences=True) == ["先查订单。", "再退款！", "好吗？"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Missing time.. Place it.", ["Missing time..", " Place it."]),
        ("Missing time..Place it.", ["Missing time..", "Place it."]),
        ("All confirmed... Place it.", ["All confirmed...", " Place it."]),
        ("All confirmed...Place it.", ["All confirmed...", "Place it."]),
        ("All confirmed...", ["All confirmed..."]),
        ("Missing time. . Place it.", ["Missing time.", " . Place it."]),
        ("缺时间……问吧。", ["缺时间……", "问吧。"]),
        ("He is J. R. Smith of the U.S. Army. Go.", ["He is J. R. Smith of the U.S. Army.", " Go."]),
        ("So 5! = 120. Go.", ["So 5! = 120.", " Go."]),
        ("..", [".."]),
        ("../a.b and ...", ["../a.b and ..."]),
    ],
)
def test_runs_of_points_and_initials(text: str, pieces: list[str]) -> None:
    cuts = [0, *sentence_cuts(text), len(text)]
    assert [text[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)] == pieces  # noqa: RUF007


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("12", 12), ("十二", 12), ("二十", 20), ("百二十三", 123), ("⑫", 12), ("❷", 2), ("➂", 3)],
        *[("xii", 12), ("IV", 4), ("three", 3), ("b", 2), ("", None), (None, None), ("?", None)],
    ],
)
def test_numbers(text: str | None, value: int | None) -> None:
    assert number_of(text) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lines: [{name: a, level: step, regexp: x}]\nsentences: [1]", "unknown key 'regexp'.*did you mean 'regex'"),
        ("lines: [{name: a, level: steps, regex: x}]\nsentences: [1]", "level 'steps' is not one of.*'step'"),
        ("lines: [{name: a, level: step, regex: '('}]\nsentences: [1]", "is no regular expression"),
        ("lines: [1]\nsentences: [1]", "1 has no keys"),
        ("lines: [{name: a, level: step, regex: a}]", "has no 'sentences'"),
        ("- a", "holds list where keys"),
        ("{", "cannot be read"),
    ],
)
def test_a_bad_file_of_markers_is_refused_with_its_fault(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Markers.read(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kinds: [{name: a, of: [idea], regex: {en: [x]}}]\nobjects: {a: {en: [x]}}", "'idea' under `of`"),
        ("kinds: [{name: a, regex: x}]\nobjects: {a: {en: [x]}}", "is not a list of patterns by language"),
    ],
)
def test_a_bad_file_of_kinds_is_refused_with_its_fault(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "k.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Kinds.read(str(path))


def test_a_file_of_ones_own_adds_a_marker(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    shipped = assets.find("data", "steps/markers.yaml").read_text(encoding="utf-8")
    path.write_text(
        shipped.replace("lines:\n", "lines:\n  - {name: etape, level: step, regex: 'Étape \\d+'}\n"), encoding="utf-8"
    )
    assert tops("Étape 1 voir\nÉtape 2 aller", markers=str(path)) == [
        ("Étape 1 voir", "etape"),
        ("Étape 2 aller", "etape"),
    ]
