"""The page: well-formed, self-contained, readable, complete, and deaf to what layers are called."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ul2q.pipeline.report import page
from ul2q.pipeline.report.compare import Comparison
from ul2q.pipeline.report.schema import Report, complete

Make = Callable[..., Report]
VOID = {"meta", "link", "br", "wbr", "img", "rect", "line", "path"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style><h1>taken over</h1>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp; \u202eright to left\u202c \u6df1\u5c64 \N{SNOWMAN}",
    "javascript:alert(1)",
    "a" * 300,
]


class Page(HTMLParser):
    """What is on a page: its elements with their attributes and text, and where they stand."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.parents: list[int | None] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({key for key, _ in attrs}) == len(attrs)
        self.parents.append(self.open[-1] if self.open else None)
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for i in self.open:
            self.elements[i][2].append(data)

    def all(self, *tags: str) -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of the elements called ``tags``."""
        return [(attrs, "".join(data)) for tag, attrs, data in self.elements if tag in tags]

    def skeleton(self) -> list[tuple[str, list[str]]]:
        """Tags and names of attributes, but for places to wrap a name: what does not depend on texts."""
        return [(tag, list(attrs)) for tag, attrs, _ in self.elements if tag != "wbr"]


@pytest.fixture(params=["report", "plan", "channels", "comparison"])
def source(request: pytest.FixtureRequest, make_report: Make, names: list[str]) -> str:
    if request.param == "report":
        return page.html(make_report(names))
    if request.param == "channels":
        return page.html(make_report(names[:7], k=8, granularity="channel"))
    whole = make_report(names)
    if request.param == "comparison":
        other = make_report([*names[:50], "new.layer"], k=4)
        return page.comparison_html(Comparison(("a", "b"), (whole, other)))
    bare = {key: whole[key] for key in ("ul2q", "model", "config", "seed")}  # type: ignore[literal-required]
    layers = [{"name": "conv", "op": "Conv2d", "parameters": 5, "quantized": True}]
    return page.html(complete({**bare, "layers": layers}))


def test_it_is_one_file_that_runs_nothing(source: str) -> None:
    parsed = Page(source)
    assert "http:" not in source
    assert "https:" not in source
    assert "url(" not in source
    assert "@import" not in source
    policy = [attrs for attrs, _ in parsed.all("meta") if attrs.get("http-equiv")]
    assert [p["content"] for p in policy] == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    ids = [attrs["id"] for _, attrs, _ in parsed.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    for tag, attrs, _ in parsed.elements:
        assert tag not in {"script", "iframe", "object", "embed", "img", "image", "use"}
        assert not [name for name in attrs if name.startswith("on")]
        for name in {"src", "href", "xlink:href", "action"} & attrs.keys():
            target = attrs[name] or ""
            assert target == "data:," or (target[0] == "#" and target[1:] in ids)


def test_screen_readers_find_their_way(source: str) -> None:
    parsed = Page(source)
    assert parsed.elements[0][:2] == ("html", {"lang": "en"})
    assert len(parsed.all("main")) == len(parsed.all("h1")) == len(parsed.all("footer")) == 1
    levels = [int(tag[1]) for tag, _, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(later <= before + 1 for before, later in itertools.pairwise(levels))
    ids = {attrs["id"] for _, attrs, _ in parsed.elements if "id" in attrs}
    assert {attrs["aria-labelledby"] for _, attrs, _ in parsed.elements if "aria-labelledby" in attrs} <= ids
    titles = {
        parsed.parents[i]: "".join(data) for i, (tag, _, data) in enumerate(parsed.elements) if tag == "title"
    }
    for i, (tag, attrs, data) in enumerate(parsed.elements):
        if tag == "svg":
            assert attrs.get("aria-hidden") == "true" or (attrs["role"] == "img" and titles[i].strip())
        if tag == "table":
            assert "caption" in [
                parsed.elements[j][0] for j, parent in enumerate(parsed.parents) if parent == i
            ]
        if tag == "th":
            assert attrs["scope"] in {"col", "row"}
        if tag in {"h1", "h2", "h3", "summary", "caption", "a"}:
            assert "".join(data).strip()


def test_decoration_stands_beside_the_number_that_it_shows(make_report: Make, names: list[str]) -> None:
    parsed = Page(page.html(make_report(names)))
    rows = [
        "".join(data)
        for i, (tag, attrs, data) in enumerate(parsed.elements)
        if tag == "li" and (parent := parsed.parents[i]) is not None
        and str(parsed.elements[parent][1].get("class", "")).startswith("chart")
    ]  # fmt: skip
    assert len(rows) == 4 + 45 + 45 + 55 + 54  # accuracy, loss, SQNR, sizes, activations
    assert all(re.search(r"\d|not measured", row) for row in rows)


def test_every_layer_is_there_with_its_picture_or_its_reason(make_report: Make, names: list[str]) -> None:
    report = make_report(names)
    parsed = Page(page.html(report))
    heads = [text for attrs, text in parsed.all("th") if attrs["scope"] == "row"]
    titles = [text for _, text in parsed.all("title")]
    cells = [text for _, text in parsed.all("td")]
    for layer in report["layers"]:
        assert layer["name"] in heads
        pictures = [title for title in titles if f"weights of {layer['name']}, " in title]
        assert len(pictures) == layer["quantized"]
        assert layer["quantized"] or layer["reason"] in cells
    assert [text for _, text in parsed.all("dt")] == ["accuracy drop", "compression", "speed-up"]
    assert [text for attrs, text in parsed.all("dd") if attrs["class"] == "value"] == [
        "0.20 points", f"{report['size']['ratio']:.1f}×", "2.00×",
    ]  # fmt: skip


def test_the_page_speaks_of_intervals_where_it_shows_them(make_report: Make, names: list[str]) -> None:
    values: dict[str, Any] = dict(make_report(names))
    assert "confidence intervals" in page.html(complete(values))
    values["accuracy"] |= {"metric": "max_f"}
    shown = page.html(complete(values))
    assert "confidence intervals" not in shown
    assert "max_f on 1,000 test samples." in shown


def test_memory_and_arithmetic_are_in_numbers(make_report: Make, names: list[str]) -> None:
    source = page.html(make_report(names))
    rows = [
        re.sub(r"<[^>]*>+", "|", row.replace("<wbr>", ""))
        for row in re.findall("<tr role=.row.>.*</tr>", source)
    ]
    shown = {re.sub(r"\|+", "|", row) for row in rows}
    assert "|planned: weights and live activations|99.0 kB|14.0 kB|" in shown
    assert "|measured: a process that loads and runs the file|90.0 MB|80.0 MB|" in shown
    assert "|times the bits of both factors|1,024,000|16,000|" in shown
    assert f"|{names[0]}|10,000|" in shown


def test_long_names_wrap_between_their_parts(make_report: Make) -> None:
    source = page.html(make_report(["encoder_stages.10.conv", "a/b <br>.c", "end."]))
    assert source.count('<span class="name">encoder_<wbr>stages.<wbr>10.<wbr>conv</span>') == 4
    assert source.count('<th scope="row" role="rowheader">a/<wbr>b &lt;br&gt;.<wbr>c</th>') == 3
    assert ">end.</span>" in source


def test_names_are_text_whatever_they_hold(make_report: Make) -> None:
    tame = Page(page.html(make_report([f"layer{i}" for i in range(len(HOSTILE))])))
    source = page.html(make_report(HOSTILE))
    parsed = Page(source)
    assert parsed.skeleton() == tame.skeleton()
    heads = [text for attrs, text in parsed.all("th") if attrs["scope"] == "row"]
    assert set(HOSTILE) <= set(heads)
    assert parsed.all("h1")[0][1] == HOSTILE[0]


def test_names_of_runs_are_text_too(make_report: Make, names: list[str]) -> None:
    reports = make_report(names), make_report(HOSTILE)
    tame = Page(
        page.comparison_html(Comparison(("a", "b"), (reports[0], make_report([f"x{i}" for i in range(8)]))))
    )
    parsed = Page(page.comparison_html(Comparison((HOSTILE[0], HOSTILE[1]), reports)))
    assert parsed.skeleton() == tame.skeleton()


def test_the_same_report_gives_the_same_bytes(make_report: Make, names: list[str]) -> None:
    assert page.html(make_report(names)) == page.html(make_report(names))


def test_few_histograms_are_open_and_many_are_folded(make_report: Make, names: list[str]) -> None:
    for count, is_open in ((7, True), (54, False)):
        folds = Page(page.html(make_report(names[:count]))).all("details")
        assert ("open" in folds[0][0]) == is_open


STYLE = (Path(page.__file__).parent / "page.css").read_text()


def themes() -> dict[str, dict[str, str]]:
    """The colours of each theme: light, dark, print."""
    blocks = re.findall(r":root\s*{([^}]*)}", STYLE)
    assert len(blocks) == 3
    colours = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6});", block)) for block in blocks]
    assert colours[0].keys() == colours[1].keys() == colours[2].keys()
    return dict(zip(("light", "dark", "print"), colours, strict=True))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_knows_black_and_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_and_pictures_stand_out(theme: str) -> None:
    colour = themes()[theme]
    for front, back in (
        ("text", "page"), ("text", "card"), ("muted", "page"), ("muted", "card"), ("after", "page"),
        ("warn-text", "warn"),
    ):  # fmt: skip
        assert contrast(colour[front], colour[back]) >= 4.5, (front, back)
    for back in ("page", "card"):
        for front in ("before", "after", "level", "muted"):
            assert contrast(colour[front], colour[back]) >= 3, (front, back)


def test_colours_come_from_the_theme_only() -> None:
    rest = re.sub(r":root\s*{[^}]*}", "", STYLE)
    assert not re.findall(r"#[0-9a-f]{3,8}\b|rgb|hsl", rest)
    assert set(re.findall(r"var\(--([\w-]+)\)", rest)) - {"name", "value"} <= themes()["light"].keys()


MEASURE = """
const frame = document.querySelector("iframe"), page = frame.contentDocument, faults = [];
page.querySelectorAll("details").forEach(fold => { fold.open = true; });
for (const element of page.querySelectorAll("body *")) {
  const box = element.getBoundingClientRect(), style = frame.contentWindow.getComputedStyle(element);
  const right = frame.contentDocument.documentElement.clientWidth;
  if (box.width && (box.right > right + 0.5 || box.left < -0.5)) faults.push("outside: " + element.outerHTML);
  const hides = style.overflow !== "visible" && !element.closest("svg");
  if (hides && element.scrollWidth > element.clientWidth + 1) faults.push("cut: " + element.outerHTML);
}
for (const cell of page.querySelectorAll("td.right")) {
  const range = page.createRange(), text = cell.firstChild;
  for (let i = 1; text && i < text.length; i++) {
    if (!/[\\d.,]\\d/.test(text.data.slice(i - 1, i + 1))) continue;
    const tops = [i - 1, i].map(at => {
      range.setStart(text, at);
      range.setEnd(text, at + 1);
      return range.getBoundingClientRect().top;
    });
    if (Math.abs(tops[0] - tops[1]) > 4) faults.push("torn: " + text.data);
  }
}
const boxes = [], walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode());) {
  if (!node.data.trim() || node.parentElement.closest("svg")) continue;
  const range = page.createRange();
  range.selectNodeContents(node);
  for (const box of range.getClientRects()) if (box.width > 1 && box.height > 1) boxes.push([box, node.data]);
}
boxes.forEach(([a, one], i) => boxes.slice(i + 1, i + 60).forEach(([b, other]) => {
  const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (wide > 1 && high > 4) faults.push("overlap: " + one + " | " + other);
}));
const lines = faults.map(line => line.slice(0, 200));
document.body.textContent = JSON.stringify({texts: boxes.length, faults: lines});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize(("width", "medium"), [(375, "screen"), (1280, "screen"), (688, "print")])
def test_a_browser_lays_it_out_without_clipping_or_overlap(
    make_report: Make, names: list[str], tmp_path: Path, width: int, medium: str, compared: bool
) -> None:
    assert CHROMIUM is not None
    long = [f"feature_extractor.backbone_stages.{i}.residual_block.convolution" for i in range(7)]
    report = make_report([*names[:20], *long, *HOSTILE])
    report["operations"] |= {"multiply_adds": 15_539_306_496, "float_bit_operations": 15_912_249_851_904}
    source = page.html(report)
    if compared:
        values: dict[str, Any] = dict(make_report([*names[5:20], *long[:5], *HOSTILE], k=4))
        values["model"] |= {"sha256": "cd" * 32}
        source = page.comparison_html(Comparison((HOSTILE[0], HOSTILE[7]), (report, complete(values))))
    if medium == "print":  # width: that of the text on A4
        source = source.replace("@media screen", "@media print").replace("@media print {", "@media all {")
    frame = f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(source)}"></iframe>'
    script = f"addEventListener('load', () => {{{MEASURE}}});"
    file = tmp_path / "frame.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}<script>{script}</script>')
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    body = re.findall("<body>(.*)</body>", done.stdout, re.DOTALL)[0]
    measured = json.loads(html.unescape(body))
    assert measured["texts"] > 200
    assert measured["faults"] == []
