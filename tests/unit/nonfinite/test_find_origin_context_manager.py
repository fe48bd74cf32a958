"""`find_origin` around any code: results stay the same, nothing is kept alive, and infinities on purpose are not reported."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as module_of_torch  # noqa: E402

import sonde  # noqa: E402
from sonde.nonfinite.operation_tracer import NonFiniteTracer  # noqa: E402

pytestmark = pytest.mark.torch


class Everything(nn.Module):
    """Dropout, BatchNorm, attention, a recurrent layer, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.conv(x).transpose(1, 2)
        mask = torch.ones(hidden.shape[1], hidden.shape[1]).triu(1).bool()
        return self.head(self.rnn(self.encoder(hidden, src_mask=mask))[0][:, -1])


def trained(num_steps: int, traced: bool, optimizer=torch.optim.Adam) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Everything()
    step_of = optimizer(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        x, y = torch.randn(6, 3, 10), torch.randint(0, 4, (6,))

        def step(x=x, y=y):
            step_of.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step_of.step()

        if traced:
            with sonde.find_origin(model) as search:
                step()
            assert search.origin is None
        else:
            step()
    return [*model.state_dict().values(), torch.rand(3)]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_under_a_search_is_the_same_bit_by_bit(optimizer):
    for a, b in zip(trained(4, False, optimizer), trained(4, True, optimizer), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_becomes_non_finite_gives_the_same_bits_too():
    def run(traced):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        with sonde.find_origin() if traced else torch.enable_grad():
            model(torch.randn(5, 4)).relu().log().sum().backward()
        return [p.grad.view(torch.int32) for p in model.parameters()]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


def test_fast_paths_of_inference_are_taken_as_without_a_search():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = model(x)
        with sonde.find_origin():
            traced = model(x)
    assert torch.equal(plain, traced)


def test_leaving_removes_every_hook_even_after_an_exception():
    hooks = (module_of_torch._global_forward_hooks, module_of_torch._global_forward_pre_hooks)
    before = [len(each) for each in hooks], torch._C._len_torch_dispatch_stack()
    with pytest.raises(ZeroDivisionError), sonde.find_origin():
        raise ZeroDivisionError
    assert ([len(each) for each in hooks], torch._C._len_torch_dispatch_stack()) == before


def test_no_model_or_tensor_of_the_user_is_kept_alive():
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with sonde.find_origin(model) as search:
        loss = (model(x) * 0).log().sum()
        loss.backward()
    refs = [weakref.ref(model), weakref.ref(x), weakref.ref(loss)]
    del model, x, loss
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert search.origin.operation == "log"


def test_the_users_tensors_are_not_changed():
    x = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
    version = x._version
    with sonde.find_origin():
        x.log().sum()
    assert (x._version, x.tolist(), x.grad) == (version, [0.0, 1.0, 2.0], None)


def test_raise_on_origin_raises_before_the_backward_with_the_origin():
    model = nn.Linear(3, 3)
    with pytest.raises(sonde.NonFiniteError) as found, sonde.find_origin(model, raise_on_origin=True):
        (model(torch.ones(2, 3)) * 0).log().sum().backward()
    assert found.value.origin.key == "log-of-zero"
    assert model.weight.grad is None
    assert isinstance(found.value, sonde.SondeError)


def test_raise_on_origin_without_a_backward_raises_at_the_end_of_the_block():
    with pytest.raises(sonde.NonFiniteError), sonde.find_origin(raise_on_origin=True):
        torch.zeros(2).reciprocal()


def test_an_error_of_the_program_itself_is_not_replaced():
    def program():
        torch.zeros(2).reciprocal()
        raise KeyError("mine")

    with pytest.raises(KeyError), sonde.find_origin(raise_on_origin=True):
        program()


@pytest.mark.parametrize("wrong", [3, "model", [nn.Linear(1, 1)], {"a": 1}])
def test_an_argument_that_is_no_model_raises_a_sonde_error(wrong):
    with pytest.raises(sonde.SondeError, match="find_origin takes a model"):
        sonde.find_origin(wrong)


def test_several_models_are_named_by_their_keys():
    models = {"generator": nn.Sequential(nn.Linear(2, 2)), "critic": nn.Sequential(nn.Linear(2, 2), nn.ReLU())}
    with torch.no_grad():
        models["critic"][0].weight.fill_(float("nan"))
    with sonde.find_origin(models) as search:
        models["critic"](models["generator"](torch.ones(1, 2))).sum().backward()
    assert (search.origin.module, search.origin.parameters) == ("critic.0", ("critic.0.weight",))


def test_code_without_a_nan_or_an_inf_has_no_origin():
    with sonde.find_origin() as search:
        torch.ones(3).log().sum()
    assert search.origin is None
    assert str(search) == "no unintended NaN or Inf was created"


# ---- infinities on purpose


def causal_attention():
    scores = torch.randn(2, 4, 4, requires_grad=True)
    mask = torch.full((4, 4), float("-inf")).triu(1)
    (scores + mask).softmax(-1).square().sum().backward()


def masked_logsumexp():
    scores = torch.randn(3, 5, requires_grad=True)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[:, 3:] = True
    scores.masked_fill(padding, -torch.inf).logsumexp(-1).sum().backward()


def maximum_of_unmasked_values():
    scores = torch.randn(3, 5, requires_grad=True)
    torch.where(scores > -9, scores, torch.tensor(-torch.inf)).max(-1).values.sum().backward()


def discarded_branch():
    x = torch.tensor([0.0, 0.5, 2.0], requires_grad=True)
    logs = x.detach().log()
    (torch.where(x > 0, logs, torch.zeros(())) * x).sum().backward()


def metric_without_gradient():
    x = torch.randn(4, requires_grad=True)
    x.square().sum().backward()
    with torch.no_grad():
        x[x > 1e9].mean()


def log_of_a_mask():
    scores = torch.randn(4, 4, requires_grad=True)
    allowed = torch.ones(4, 4).tril()
    (scores + allowed.log()).softmax(-1).square().sum().backward()


def best_so_far():
    best = torch.tensor(float("inf"))
    x = torch.randn(4, requires_grad=True)
    loss = x.square().sum()
    best = torch.minimum(best, loss.detach())
    loss.backward()


def fused_attention():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    mask = torch.ones(4, 4).tril().bool()
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


def ctc_in_evaluation():
    with torch.no_grad():
        chances = torch.randn(12, 2, 5).log_softmax(-1)
        F.ctc_loss(chances, torch.tensor([[1, 2], [3, 3]]), torch.tensor([12, 9]), torch.tensor([2, 2]))


def fused_attention_in_evaluation():
    q = torch.randn(1, 2, 4, 8)
    F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4).tril(-1).bool())


INTENTIONAL = [causal_attention, masked_logsumexp, maximum_of_unmasked_values, discarded_branch]
INTENTIONAL += [metric_without_gradient, log_of_a_mask, best_so_far, fused_attention, ctc_in_evaluation, fused_attention_in_evaluation]


@pytest.mark.parametrize("program", INTENTIONAL)
def test_an_infinity_on_purpose_is_no_origin(program):
    with sonde.find_origin() as search:
        program()
    assert search.origin is None


def test_masks_are_reported_with_ignore_masks_false():
    with sonde.find_origin(ignore_masks=False) as search:
        torch.zeros(3).masked_fill(torch.tensor([True, False, False]), -torch.inf)
    assert (search.origin.key, search.origin.operation) == ("written", "masked_fill")


def test_a_mask_that_reaches_the_loss_is_an_origin():
    x = torch.randn(3, requires_grad=True)
    with sonde.find_origin() as search:
        x.masked_fill(torch.tensor([True, False, False]), -torch.inf).sum().backward()
    assert (search.origin.key, search.origin.operation) == ("written", "masked_fill")


# ---- errors of the search do not reach the program


def test_a_failed_search_does_not_stop_the_program(monkeypatch, caplog):
    import sonde.nonfinite.operation_tracer as tracer_module

    def broken(*_):
        raise RuntimeError("no such number")

    monkeypatch.setattr(tracer_module, "nonfinite_kind", broken)
    with caplog.at_level(logging.WARNING, "sonde"), NonFiniteTracer() as tracer:
        result = torch.zeros(2).log() + torch.zeros(2).log()
    assert result.isinf().all()
    assert tracer.origin is None
    assert "no such number" in tracer.caveats[0]
    assert len(caplog.records) == 1


def test_sparse_complex_and_vmapped_tensors_pass_through():
    with sonde.find_origin() as search:
        sparse = torch.eye(3).to_sparse() * 2
        dense = torch.sparse.mm(sparse, torch.ones(3, 3))
        torch.fft.fft(dense).abs().sum()
        torch.func.vmap(torch.sin)(dense)
    assert search.origin is None


def test_searches_can_be_nested():
    with sonde.find_origin() as outer, sonde.find_origin() as inner:
        torch.zeros(2).reciprocal()
    assert inner.origin.operation == outer.origin.operation == "reciprocal"
