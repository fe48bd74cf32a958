"""A layer that is named only by a number is shown with its class; JSON keeps the path."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from sonde.events import Finding, Severity
from sonde.render.html.report_html import report_html
from sonde.render.report_markdown import report_markdown
from sonde.render.terminal.report_terminal import TerminalReport
from sonde.report import diagnose
from sonde.rules.rule import Rule
from sonde.runlog.run_reader import Run


def on_terminal(report):
    file = io.StringIO()
    Console(file=file, width=100, highlight=False).print(TerminalReport(report))
    return file.getvalue()


@pytest.fixture
def run(sample_run):
    return Run(sample_run("numbers", [2.0 * 0.95**i for i in range(40)], layers=("0", "4")))


def report_on(run, where):
    cause = Finding("dead-relu", Severity.ERROR, where, 3, "it outputs zeros", "change it")
    consequence = Finding("loss-plateau", Severity.WARNING, where, 5, "it does not learn", "", {"consequence_of": "dead-relu"})
    rule = Rule("dead-relu", lambda view: [cause], "")  # the report knows the classes of the layers that its own rules name
    return replace(diagnose(run, [rule]), findings=(cause, consequence), verdict="problems")


def test_every_rendering_shows_the_class_of_a_numbered_layer(run):
    report = report_on(run, "4")
    name = "layer 4 (Linear)"
    assert on_terminal(report).count(f" in {name}") == 2
    assert report_markdown(report).count(f" in `{name}`") == 2
    assert report_html([(report, run)]).count(f'<code class="where">{name}</code>') == 2


def test_causes_name_numbered_layers_in_the_same_way(sample_run):
    report = diagnose(sample_run("bad", [1.0] * 20 + [float("nan")] * 20, layers=("0", "4"), bad_layer="4"))
    assert "the output of layer 4 (Linear) was not finite" in " ".join(on_terminal(report).split())


def test_a_class_that_is_not_known_is_left_out(run):
    assert "dead-relu in layer 7  from step 3" in on_terminal(report_on(run, "7"))
    assert "dead-relu in `layer 7`\n" in report_markdown(report_on(run, "7"))


@pytest.mark.parametrize("where", ["encoder.4", "4.weight", "head"])
def test_other_paths_are_shown_as_they_are(run, where):
    assert f"dead-relu in {where}  from step 3" in on_terminal(report_on(run, where))


def test_json_keeps_the_path(run):
    assert [finding["where"] for finding in json.loads(report_on(run, "4").to_json())["findings"]] == ["4", "4"]
