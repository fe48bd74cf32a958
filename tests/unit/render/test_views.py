"""The views of a report: each draws all of it, in the same order, and none is fooled by a name."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from sonde.events import Event, Finding, Severity
from sonde.render.html.html_page import POLICY
from sonde.render.html.report_html import report_html
from sonde.render.report_content import group_findings
from sonde.render.report_markdown import report_markdown
from sonde.render.terminal.print_to_terminal import paragraph
from sonde.render.terminal.report_terminal import TerminalReport
from sonde.report import diagnose
from sonde.runlog.run_reader import Run

EVIL = """<script>alert(1)</script>"'`|*_[x](https://evil.example)\x1b[31m"""


def on_paper(report, width=100):
    paper = io.StringIO()
    Console(file=paper, width=width, highlight=False).print(TerminalReport(report))
    return paper.getvalue()


def page(run):
    return report_html([(diagnose(run), run)])


class Outline(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def evil_run(sample_run):
    events = [
        Event("source", 0, {"call": "optimizer_step", "line": f"{EVIL}:1", "text": EVIL, "optimizer": 0}),
        Event("unobserved", 0, {"where": EVIL, "reason": EVIL}),
    ]
    return sample_run(
        "evil",
        [2.0 * 1.2**i for i in range(60)],
        scalars={"zero_grads": 0, "stale_updates": 1},
        layers=(EVIL,),
        events=events,
        ending={"how": "exception", "exception": EVIL},
        bad_layer=EVIL,
    )


def test_the_text_says_verdict_cause_line_fix_cost_and_run_in_this_order(broken_run):
    text = on_paper(diagnose(broken_run))
    wanted = ["problems", "70 steps", "missing-zero-grad", "cause", "train.py:41   optimizer.step()", "fix", "not evaluated"]
    places = [text.index(each) for each in [*wanted, "7 of 70 steps observed", "\nrun "]]
    assert places == sorted(places)


def test_the_text_draws_the_nan_of_the_loss(broken_run):
    assert re.search(r"loss .*█✗+ NaN", on_paper(diagnose(broken_run)))


def test_consequences_stand_below_their_cause_without_a_fix_of_their_own(broken_run):
    report = diagnose(broken_run)
    (cause, consequences), *others = group_findings(report.findings)
    assert cause.rule == "missing-zero-grad"
    assert consequences
    assert not others
    text = on_paper(report)
    for finding in consequences:
        assert f"and so: {finding.rule}" in text
        assert finding.fix[:30] not in text


def test_a_consequence_whose_cause_is_missing_stands_by_itself():
    finding = Finding("dead-relu", Severity.ERROR, "net.2", 3, "…", "…", {"consequence_of": "nobody"})
    assert group_findings([finding]) == [(finding, [])]


def test_a_healthy_run_is_said_to_be_healthy_in_few_lines(healthy_run):
    text = on_paper(diagnose(healthy_run))
    assert text.startswith("✓ healthy")
    assert len(text.splitlines()) < 10


def test_a_run_without_training_is_unknown_and_never_healthy(sample_run):
    report = diagnose(sample_run("empty"))
    for view in (on_paper(report), report_markdown(report), report_html([(report, Run(report.run.path))])):
        assert "Sonde saw no training" in view
        assert "ealthy" not in Outline(view).text[-1]
    assert on_paper(report).startswith("? unknown")


@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_ends_in_blanks(broken_run, width):
    for line in on_paper(diagnose(broken_run), width).splitlines():
        assert len(line) <= width
        assert width < 60 or line == line.rstrip()


def test_the_page_is_one_file_that_loads_and_executes_nothing(broken_run):
    outline = Outline(page(Run(broken_run)))
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("content", POLICY) in outline.attributes


def test_the_page_shows_finding_chart_and_statistics_with_bad_numbers_marked(broken_run):
    text = page(Run(broken_run))
    for part in ("missing-zero-grad", "optimizer.step()", "NaN from step 60", "Outputs of layers", "encoder.weight"):
        assert part in text
    assert "<td class=bad>60</td>" in text  # 60 NaN in the output of the head
    assert '<rect class="bad"' in text


def test_a_page_of_several_runs_has_a_section_for_each(broken_run, healthy_run):
    runs = [Run(broken_run), Run(healthy_run)]
    text = report_html([(diagnose(run), run) for run in runs])
    assert text.count('<section class="subject">') == 2


def test_r72_hostile_names_are_text_in_the_page(evil_run, broken_run):
    hostile, tame = Outline(page(Run(evil_run))), Outline(page(Run(broken_run)))
    assert "script" not in hostile.tags
    assert set(hostile.tags) <= set(tame.tags) | {"code"}
    assert any("<script>alert(1)</script>" in text for text in hostile.text)  # shown as it is named
    assert not any("\x1b" in text for text in hostile.text)


def test_r72_hostile_names_are_text_in_markdown(evil_run):
    text = report_markdown(diagnose(evil_run))
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert "<script>" not in outside_code.replace("\\<", "")
    assert "](http" not in outside_code.replace("\\]", "")
    assert "\x1b" not in text


def test_the_json_is_strict_and_of_the_published_schema(broken_run):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    document = json.loads(diagnose(broken_run).to_json(), parse_constant=refuse)
    assert document["schema"] == 1
    assert document["verdict"] == "problems"
    assert set(document["findings"][0]) == {"rule", "severity", "where", "step", "cause", "fix", "evidence"}
    assert document["findings"][0]["rule"] == "missing-zero-grad"
    assert {"run", "not_evaluated", "overhead", "unobserved"} <= set(document)


def test_every_view_leads_with_the_same_finding(broken_run):
    report = diagnose(broken_run)
    rules = [finding.rule for finding in report.findings]
    for view in (on_paper(report), report_markdown(report), page(Run(broken_run))):
        places = [view.index(f"{rule}") for rule in rules]
        assert places[0] == min(places)


def test_a_crashed_run_says_nothing_found_and_its_message_in_one_line(sample_run):
    run = Run(sample_run("crashed", [2.0 * 0.98**i for i in range(60)]))
    report = diagnose(run)
    facts = replace(report.run, exception="RuntimeError: Error(s) in loading:\n\tsize mismatch \x1b[31m" + "x" * 500, ended="exception")
    report = replace(report, run=facts, verdict="nothing_found", why_nothing_found="The training did not run to its end.")
    shown = " ".join(on_paper(report).split())
    assert shown.startswith("– nothing found The training did not run to its end. 60 steps")
    assert "ended by RuntimeError: Error(s) in loading: size mismatch \\x1b[31m" in shown
    assert "\x1b" not in shown
    assert "x" * 300 not in shown.replace(" ", "")
    assert report_markdown(report).startswith("# Sonde: nothing found\n")
    assert '<span class="verdict nothing_found">Nothing found</span>' in report_html([(report, run)])


def test_parameters_without_gradients_are_counted_apart(sample_run):
    report = diagnose(sample_run("teacher", [2.0 * 0.98**i for i in range(60)]))
    model = {"class": "Both", "num_parameters": 322, "num_trainable": 161}
    report = replace(report, run=replace(report.run, models=(model,)))
    assert "Both (161 parameters and 161 without gradients)" in on_paper(report)


def test_v_lists_the_rules_that_were_not_evaluated(sample_run):
    report = diagnose(sample_run("short", [2.0, 1.9]))
    paper = io.StringIO()
    Console(file=paper, width=100, highlight=False).print(TerminalReport(report, is_verbose=True))
    shown = " ".join(paper.getvalue().split())
    assert all(f"{one.rule}: {one.reason}" in shown for one in report.not_evaluated)


def test_a_number_is_not_parted_from_its_unit():
    text = "labels from 12 % (class 8) to 8.8 % (class 9) in 120 ms, 3 steps"
    for width in range(20, 60):
        rows = [row.plain for row in paragraph(text, width)]
        assert " ".join(rows) == text
        assert not any(row.startswith(("%", "ms")) for row in rows)
