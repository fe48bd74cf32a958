"""pytest plugin: fixtures that check that a training in a test is healthy and within 10 % of its baseline.

pytest loads it wherever Sonde is installed; it costs nothing until a test uses a fixture, and `-p no:sonde` disables it. A baseline is a
file beside the tests, written by `pytest --sonde-update`, to be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import pytest

if TYPE_CHECKING:
    from sonde.report import Report
    from sonde.session import DebugSession

DIRECTORY = "sonde_baselines"
WITHIN = 0.10  # of the baseline
STEPS = 20  # enough for a loss to have a band
_WRITTEN = pytest.StashKey[list[str]]()
_NOTES = pytest.StashKey[list[str]]()


class BaselineFixture(Protocol):
    """`with sonde_baseline(model, optimizer): train()`. `name` distinguishes several trainings in one test."""

    def __call__(
        self, model: Any, optimizer: Any = None, *, name: str = "", within: float = WITHIN, ignore: Collection[str] = ()
    ) -> AbstractContextManager[DebugSession]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sonde", "trainings and their baselines (Sonde)")
    group.addoption("--sonde-update", action="store_true", help="write the baselines of the tests that are run, instead of comparing")
    group.addoption("--sonde-times", action="store_true", help="check the speed of trainings too: for machines that do nothing else")
    parser.addini("sonde_baselines", f"directory of the baselines, from the root; otherwise {DIRECTORY} beside each test file", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_WRITTEN], config.stash[_NOTES] = [], []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for path in config.stash[_WRITTEN]:
        terminalreporter.write_line(f"sonde: baseline written: {path}")
    notes = config.stash[_NOTES]
    for note in dict.fromkeys(notes):
        terminalreporter.write_line(f"sonde: {note}")


@pytest.fixture
def sonde_baseline(request: pytest.FixtureRequest) -> BaselineFixture:
    """Watches a training; the test fails if the training is not healthy or departs from its baseline.

    with sonde_baseline(model, optimizer):
        for x, y in batches:
            ...
    """

    @contextmanager
    def watch(
        model: Any, optimizer: Any = None, *, name: str = "", within: float = WITHIN, ignore: Collection[str] = ()
    ) -> Iterator[DebugSession]:
        import sonde

        training = _Training(request, name, within, frozenset(ignore))
        directory = request.getfixturevalue("tmp_path_factory").mktemp("sonde")
        # Every step is observed: the steps that a budget allows depend on the machine, and the result of a test must not.
        with sonde.watch(model, optimizer, to=directory / "run", every=1) as session:
            yield session
        training.judge(directory / "run")

    return watch


@pytest.fixture
def sonde_step(sonde_baseline: BaselineFixture) -> Callable[..., None]:
    """The same for a function that runs one training step: `sonde_step(step, model, optimizer)` calls it twenty times."""

    def check(
        step: Callable[[], object], model: Any, optimizer: Any = None, *, steps: int = STEPS, name: str = "", within: float = WITHIN,
        ignore: Collection[str] = (),
    ) -> None:  # fmt: skip
        with sonde_baseline(model, optimizer, name=name, within=within, ignore=ignore):
            for _ in range(steps):
                step()

    return check


class _Training:
    """One watched training of a test and its baseline file."""

    def __init__(self, request: pytest.FixtureRequest, name: str, within: float, ignore: frozenset[str]) -> None:
        from sonde.rules.registry import RULES, SPEED_RULES

        unknown = ignore - {rule.name for rule in RULES}
        if unknown:
            pytest.fail(f"sonde: there is no rule {sorted(unknown)[0]!r} to ignore. All of them: sonde explain", pytrace=False)
        if not within >= 0:
            pytest.fail(f"sonde: within={within} is not a share; 0.1 allows ten percent.", pytrace=False)
        self.config, self.node_id, self.within = request.config, request.node.nodeid, within
        self.times = bool(request.config.getoption("--sonde-times"))
        self.rules = tuple(rule for rule in RULES if rule.name not in ignore and (self.times or rule.name not in SPEED_RULES))
        self.path = _file(request, name)

    def judge(self, run: Path) -> None:
        if self.config.getoption("--sonde-update"):
            self._write(run)
            return
        if not self.path.exists():
            self._fail(f"there is no baseline yet in {self.path}.\nWrite it with: pytest --sonde-update {self.node_id!r}")
        from sonde.comparison.baseline_check import EVERYTHING, RULE, check_against_baseline
        from sonde.comparison.baseline_file import load
        from sonde.errors import SondeError

        checks = EVERYTHING if self.times else EVERYTHING - {"times"}
        try:
            baseline = load(self.path)
            report = check_against_baseline(run, baseline, tolerance=self.within, checks=checks, shared_process=True, rules=self.rules)
        except SondeError as error:
            self._fail(str(error))
        reasons = [one.reason for one in report.not_evaluated if one.rule == RULE]
        notes = [reason for reason in reasons if reason.startswith("times")]
        self.config.stash[_NOTES].extend(notes)
        if report.exit_code:  # problems, or unknown
            self._fail(self._format(report) + f"\nIf this change is intended: pytest --sonde-update {self.node_id!r}")
        if len(reasons) > len(notes):
            self._fail(f"this training cannot be compared with {self.path.name}: {reasons[0]}.")

    def _write(self, run: Path) -> None:
        from sonde.comparison.baseline_file import baseline_of, to_json
        from sonde.errors import SondeError
        from sonde.render.safe_write import write_new
        from sonde.report import diagnose

        report = diagnose(run, self.rules)
        if report.exit_code:
            self._fail(f"a training that is not healthy cannot be a baseline.\n{self._format(report)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_new(self.path, to_json(baseline_of([run])), replace=True)
        except (SondeError, OSError) as error:
            self._fail(str(error))
        self.config.stash[_WRITTEN].append(str(self.path))

    def _format(self, report: Report) -> str:
        lines = [] if not report.why_unknown else [report.why_unknown]
        for finding in report.findings:
            location = f" in {finding.where}" if finding.where else ""
            lines.append(f"{finding.severity} {finding.rule}{location}, from step {finding.step}")
            lines += [f"  {finding.cause}", f"  fix: {finding.fix}"]
        return "\n".join(lines)

    def _fail(self, text: str) -> NoReturn:
        from sonde.formatting import printable

        pytest.fail(printable(f"sonde: {text}", lines=True), pytrace=False)


def _file(request: pytest.FixtureRequest, name: str) -> Path:
    """One file per test, parameter and name."""
    from sonde.render.safe_write import file_name

    configured = str(request.config.getini("sonde_baselines"))
    file = request.path
    if configured:
        root = request.config.rootpath
        inside = file.parent.relative_to(root) if file.is_relative_to(root) else Path()
        directory = root / configured / inside
    else:
        directory = file.parent / DIRECTORY
    test = ".".join((file.stem, *request.node.nodeid.split("::")[1:], *((name,) if name else ())))
    return directory / file_name(test, "json")
