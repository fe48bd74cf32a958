"""Six threads, each training a model of its own, with spikes and NaN: no crash, the same losses as alone, an event for every NaN."""

import sys
import textwrap

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="a step runs again in a forked process")]

import fork_server  # noqa: E402
from sonde import Run  # noqa: E402

PROGRAM = """
    import contextlib, hashlib, json, sys, threading
    import torch
    from torch import nn
    import sonde

    mode, folder, num_runs = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def train(place, found, watch):
        generator = torch.Generator().manual_seed(place)
        with lock:  # initial weights are drawn from the generator that all threads share
            torch.manual_seed(place)
            model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses = []
        with watch(model, optimizer, place):
            for step in range(70):
                x = torch.randn(16, 6, generator=generator)
                y = x[:, :1] + (1e3 if step == 50 + place else 0.0)
                loss = (model(x) - y).square().mean()
                if step == 40 + place:
                    loss = loss + (loss * 0 - 1).log()
                optimizer.zero_grad()
                loss.backward()
                for p in model.parameters():
                    p.grad.nan_to_num_(0.0)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        state = [tensor.tolist() for tensor in model.state_dict().values()]
        found[place] = hashlib.sha256(repr([losses, state]).encode()).hexdigest()

    def all_threads(watch):
        found, errors = {}, []
        threading.excepthook = lambda args: errors.append(repr(args.exc_value))
        threads = [threading.Thread(target=train, args=(place, found, watch)) for place in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
        return found

    lock = threading.Lock()
    bare = all_threads(lambda model, optimizer, place: contextlib.nullcontext())
    for number in range(num_runs):
        if mode == "one":
            session = sonde.DebugSession(to=f"{folder}/run{number}", strict=True).start()
            watched = all_threads(lambda model, optimizer, place: contextlib.nullcontext())
            session.stop()
        else:
            name = f"{folder}/run{number}"
            watched = all_threads(lambda model, optimizer, place: sonde.watch(model, optimizer, to=f"{name}-{place}", strict=True))
        assert watched == bare, (number, [place for place in bare if watched.get(place) != bare[place]])
    print("same", num_runs)
"""


@pytest.mark.parametrize("num_runs", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["one", "each"])
def test_six_threads_with_spikes_and_nan_train_as_alone_and_every_nan_has_its_event(mode, num_runs, tmp_path):
    done = fork_server.python("-c", textwrap.dedent(PROGRAM), mode, tmp_path, str(num_runs), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"same {num_runs}\n"), done.stderr
    for number in range(num_runs):
        if mode == "one":
            assert num_bad(tmp_path / f"run{number}") == 6
        else:  # a session also hears of backwards in other threads, so its run may hold their NaN too
            assert all(num_bad(tmp_path / f"run{number}-{place}") >= 1 for place in range(6))


def num_bad(path):
    return sum(event.data["what"] == "loss" for event in Run(path).events("nonfinite"))
