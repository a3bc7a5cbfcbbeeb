"""The HTML report: every layer is in it, whatever it is called, and nothing else is needed to read it."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from plansmith.verify.chart import make_chart
from plansmith.verify.page import check_page_path, render_page, write_page
from plansmith_errors import ArtifactError

EVIL = '<script>alert("&")</script>'


def weight(name, error=0.1, scheme="int4", group_size=64):
    return {
        "name": name,
        "scheme": scheme,
        "group_size": group_size,
        "kind": scheme if group_size is None else f"{scheme} g{group_size}",
        "num_weights": 1000,
        "nbytes": 547,
        "bits_per_weight": 4.376,
        "relative_error": error,
    }


def make_report(weights, **changes):
    both = {"quantized": {"perplexity": 21.5}, "unquantized": {"perplexity": 20.25}}
    figures = {"kl_per_token": 0.125, "top1_agreement": 0.75, "mean_logit_error": 0.5, "max_logit_error": 4.0}
    kinds = {"kind": "int4 g64", "num_tensors": len(weights), "num_weights": 1, "nbytes": 1, "relative_error": 0.1}
    return {
        "engine": "ours",
        "against": "theirs",
        "perplexity": {**both, "text": "sample.txt", "window": 512},
        "divergence": {**figures, "num_positions": 4088},
        "schemes": [{**kinds, "bits_per_weight": 4.376}] if weights else [],
        "weights": weights,
        **changes,
    }


NAMES = [
    f"model.layers.{layer}.{module}.weight" for layer in range(30) for module in ("mlp.up_proj", "self_attn.q_proj")
]


class Collector(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def collect(page):
    collector = Collector()
    collector.feed(page)
    return collector


def test_every_weight_is_in_the_chart_and_in_the_table_and_the_page_needs_nothing_else():
    page = render_page(make_report([weight(name) for name in [*NAMES, "model.embed_tokens.weight"]]))
    found = collect(page)
    assert found.tags.count("rect") == len(NAMES) + 1
    text = "".join(found.text)
    assert all(text.count(name) == 2 for name in NAMES)  # a bar's title, a line of the table
    assert "21.500" in text and "0.12500" in text and "75.00%" in text and "4088 positions" in text
    assert not found.links and "script" not in found.tags and "url(" not in page and "@import" not in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    ElementTree.fromstring(svg)  # well formed


def test_names_are_escaped_wherever_they_come_from():
    weights = [weight(EVIL, scheme=EVIL), weight(f"model.layers.0.{EVIL}.weight")]
    report = make_report(weights, engine=EVIL, against=EVIL)
    report["perplexity"]["text"] = EVIL
    report["schemes"][0]["kind"] = EVIL
    page = render_page(report)
    assert "<script" not in page
    assert "".join(collect(page).text).count(EVIL) >= 9


def test_bars_stand_at_their_layer_and_are_as_high_as_their_error():
    names = ["model.layers.0.a.weight", "model.layers.3.a.weight", "head.weight"]
    chart = make_chart([weight(name, error) for name, error in zip(names, (0.1, 0.05, 0.0), strict=True)])
    layers, head = chart.rows
    assert (layers.module, head.module, chart.largest) == ("a", "head", 0.1)
    assert layers.bars[0].height == pytest.approx(2 * layers.bars[1].height) and head.bars[0].height == 0
    assert layers.bars[0].x == head.bars[0].x < layers.bars[1].x
    assert [layer for _, layer in chart.ticks] == [0, 1, 2, 3]


@pytest.mark.parametrize("weights", [[], [weight("w.weight", 0.0, "none", None)]])
def test_a_model_that_lost_nothing_has_a_page_too(weights):
    page = render_page(make_report(weights))
    assert ("not quantized" in page) == (not weights)


def test_choices_stand_beside_the_unquantized_models():
    sides = {"quantized": {"acc": 0.5, "acc_stderr": 0.05, "acc_norm": 0.51}}
    sides["unquantized"] = {"acc": 0.6, "acc_stderr": 0.05, "acc_norm": 0.61}
    report = make_report([], choices={**sides, "questions": "piqa.jsonl", "num_questions": 100})
    for key in ("perplexity", "divergence"):
        del report[key]
    text = "".join(collect(render_page(report)).text)
    assert "acc on piqa.jsonl" in text and "0.6000 +/- 0.0500" in text and "perplexity" not in text


def test_a_page_is_never_written_over_something(tmp_path):
    path = tmp_path / "report.html"
    check_page_path(path)
    write_page(path, make_report([weight("w.weight")]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ArtifactError, match="exists already"):
        check_page_path(path)
    with pytest.raises(ArtifactError, match="absent is no directory"):
        check_page_path(tmp_path / "absent" / "report.html")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_page(tmp_path / "absent" / "report.html", make_report([]))
