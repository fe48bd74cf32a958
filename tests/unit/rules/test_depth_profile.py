"""The change of a signal along the depth of a model, for many observed steps at once."""

import numpy as np
import pytest

from sonde.events import Kind
from sonde.rules._shared.signal_growth_by_depth import KINDS, DepthProfiles
from synthetic_steps import LAYERS, OUTPUT_IDS, row, training, view_of


def profiles(gradients, outputs=None, num=4, over_time=True):
    """`gradients(step)` and `outputs(step)` give the rows of the layers."""

    def frames(step):
        activation = {Kind.ACTIVATION: outputs(step)} if outputs else {}
        return {Kind.ACTIVATION_GRADIENT: gradients(step), **activation}

    with view_of(training(num, frames=frames)) as view:
        (block,) = view.blocks(*KINDS)
        return DepthProfiles.of(block, over_time=over_time)


def norms(*values):
    return {path: row(l2=value) for path, value in zip(LAYERS, values)}


def test_ratios_compare_the_first_layer_with_the_last_ones():
    found = profiles(lambda step: norms(1e-4 * (step + 1), 1e-3, 1e-2, 1e-1, 1.0))
    assert found.backward == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])
    assert found.num_layers.tolist() == [5] * 4
    assert found.first_site.tolist() == [OUTPUT_IDS["net.0"]] * 4
    assert found.last_site.tolist() == [OUTPUT_IDS["head"]] * 4


def test_outputs_are_compared_from_the_last_layers_to_the_first():
    found = profiles(lambda step: norms(1, 1, 1, 1, 1), outputs=lambda step: norms(2, 2, 2, 2, 2000))
    assert found.forward == pytest.approx([1000.0] * 4)


def test_a_change_at_one_place_is_steep_and_an_even_one_is_not():
    found = profiles(lambda step: norms(1e-4, 1e-4, 1e-4, 1e-4, 1.0) if step == 0 else norms(1e-4, 1e-3, 1e-2, 1e-1, 1.0))
    assert found.steepest[0] == pytest.approx(1.0)
    assert found.steepest[1:] == pytest.approx([0.25] * 3)


def test_steps_with_a_number_that_is_not_finite_have_no_profile():
    found = profiles(lambda step: {**norms(1, 1, 1, 1, 1), "net.2": row(nan=float(step == 2))})
    assert np.isnan(found.backward).tolist() == [False, False, True, False]


def test_layers_without_a_gradient_in_some_steps_do_not_count_there():
    found = profiles(lambda step: {**norms(1e-4, 1e-3, 1e-2, 1e-1, 1.0), "net.0": row(l2=1e-4, num=0 if step % 2 else 1000)})
    assert found.num_layers.tolist() == [5, 4, 5, 4]
    assert found.backward == pytest.approx([1e-4, 1e-3, 1e-4, 1e-3])


def test_a_shallow_model_has_no_profile():
    found = profiles(lambda step: dict(list(norms(1, 1, 1, 1, 1).items())[:3]))
    assert np.isnan(found.backward).all()
