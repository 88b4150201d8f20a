"""Parameters are validated once: what is accepted works, what is refused names field, value and range."""

import copy
import math
import pickle
import subprocess
import sys

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import (
    BatchMismatch,
    HlgCurve,
    InvalidSamplingParams,
    SamplingError,
    SamplingParams,
    ToneCurve,
)

NUMBERS = st.floats(0, 1)
WINDOWS = st.integers(0, 2**20)
TOKEN_IDS = st.lists(st.integers(0, 2**31 - 2), max_size=3)
HLG = st.builds(
    HlgCurve,
    pivot=st.sampled_from(["top", "entropy", "median"]),
    width=st.floats(0, 1e3),
    shoulder=st.just(0) | st.floats(1e-3, 1e3),
    toe=st.just(0) | st.floats(1e-3, 1e3),
    gain=st.none() | st.floats(1e-6, 1e6),
)
CURVES = st.builds(ToneCurve, points=st.just([(0.01, 0.02), (1, 1), (90, 95)]))
VALID = st.builds(
    SamplingParams,
    temperature=st.floats(0, 1e6),
    top_p=NUMBERS,
    top_k=st.integers(0, 2**70),
    min_p=NUMBERS,
    min_tokens_to_keep=st.integers(1, 1024),
    top_n_sigma=st.floats(0, 1e6),
    typical_p=NUMBERS,
    xtc_probability=NUMBERS,
    xtc_threshold=st.floats(0, 0.5),
    xtc_exempt=TOKEN_IDS,
    repetition_penalty=st.just(0) | st.floats(1e-4, 1e4),
    repetition_window=WINDOWS,
    presence_penalty=st.floats(-1e4, 1e4),
    frequency_window=WINDOWS,
    dry_multiplier=st.floats(0, 1e4),
    dry_base=st.floats(1, 1e3),
    dry_breakers=TOKEN_IDS,
    min_tokens=st.integers(0, 2**70),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    hlg=st.none() | HLG,
    curve=st.none() | CURVES,
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 2), st.floats(-1e30, 1e30), max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
)

REFUSED = {
    "temperature": [-0.1, 1e7, math.nan, math.inf, -math.inf, True, "hot", None, 10**400, 1j],
    "top_p": [-1e-9, 1.01, math.nan, math.inf, False, "0.9", None, 10**400],
    "min_p": [-0.1, 2, math.nan, -math.inf, True, [], None],
    "min_tokens_to_keep": [0, 1025, 1.0, True],
    "top_n_sigma": [-0.1, 1e7, math.nan],
    "typical_p": [-0.1, 1.1, True],
    "xtc_probability": [-0.1, 1.1, math.nan],
    "xtc_threshold": [-0.1, 0.51, math.nan, None],
    "xtc_exempt": [None, 5, "5", [-1], [1.0], [True], [2**31]],
    "repetition_penalty": [-1, 1e-5, 1e5, False, math.nan, "0"],
    "repetition_window": [-1, 2**21, 1.0, False, None],
    "presence_penalty": [-1e5, math.inf, True],
    "presence_window": [-1],
    "frequency_penalty": [1e5, math.nan],
    "frequency_window": [2.5],
    "dry_multiplier": [-1, math.nan],
    "dry_base": [0.9, 1e4],
    "dry_allowed_length": [0, 2000],
    "dry_breakers": ["\n", [None]],
    "dry_window": [0, 1, 16_385],
    "min_tokens": [-1, 1.0, True],
    "ignore_eos": [0, 1, None, "yes"],
    "logprobs": [-1, 21, True, 1.0],
    "logprob_histogram": [1, None, True],
    "hlg": [{}, True],
    "curve": [[(1, 1), (2, 2)], True],
    "top_k": [-1, 1.0, math.nan, True, "5", None],
    "seed": [-(2**63) - 1, 2**64, 1.5, True, "7", 10**5000],
    "logit_bias": [
        None,
        5,
        [(1, 2.0)],
        {"1": 2.0},
        {-1: 1.0},
        {True: 1.0},
        {2**31 - 1: 1.0},
        {1.0: 1.0},
        ((1, 2.0), (1, 3.0)),
    ],
    "logit_bias[5]": [{5: math.nan}, {5: math.inf}, {5: True}, {5: "x"}, {5: None}, {5: 1e31}],
}


@given(VALID)
@settings(max_examples=60)
def test_parameters_survive_copies_and_pickling(params):
    """Equal by value after a copy, a pickle and an attrs.evolve; hashable."""
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), attrs.evolve(params)):
        assert twin == params
        assert hash(twin) == hash(params)
    assert params.is_greedy == (params.temperature == 0 and params.curve is None)


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(f, v, id=f"{f}-{i}") for f, values in REFUSED.items() for i, v in enumerate(values)],
)
def test_a_refused_value_names_field_value_and_range(field, value):
    """The error is typed, fits ValueError, tells the field and the range, and crosses processes."""
    name = field.partition("[")[0]
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert isinstance(error, (SamplingError, ValueError))
    assert error.field == field
    assert str(error).startswith(f"{field} is ")
    assert error.allowed in str(error)
    assert len(str(error)) < 250
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.field) == (str(error), error.field)


def test_bias_is_kept_sorted_by_id():
    """Two mappings with the same entries are the same parameters."""
    assert SamplingParams(logit_bias={9: 1, 2: -3.5}).logit_bias == ((2, -3.5), (9, 1.0))
    assert SamplingParams(logit_bias={9: 1, 2: 2}) == SamplingParams(logit_bias={2: 2, 9: 1})


@pytest.mark.parametrize(("given", "kept"), [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1)])
def test_seeds_are_kept_modulo_two_to_the_64(given, kept):
    """Negative seeds of 64-bit clients are accepted."""
    assert SamplingParams(seed=given).seed == kept


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("hlg.pivot", lambda: HlgCurve(pivot="middle")),
        ("hlg.width", lambda: HlgCurve(width=-1)),
        ("hlg.shoulder", lambda: HlgCurve(shoulder=1e-9)),
        ("hlg.toe", lambda: HlgCurve(toe=math.nan)),
        ("hlg.gain", lambda: HlgCurve(gain=0)),
        ("curve.points", lambda: ToneCurve(points=[(1, 1)])),
        ("curve.points", lambda: ToneCurve(points=[(1, 5), (2, 4)])),
        ("curve.points", lambda: ToneCurve(points=[(1, 1), (1, 2)])),
        ("curve.points", lambda: ToneCurve(points=[(0, 1), (1, 2)])),
        ("curve.points", lambda: ToneCurve(points=[(1, 1, 1), (2, 2)])),
        ("curve.points", lambda: ToneCurve(points=None)),
        ("curve.points", lambda: ToneCurve(points=[1, 2])),
    ],
    ids=iter(map(str, range(24))),
)
def test_a_refused_curve_names_its_field(field, make):
    """Curves are values with ranges of their own."""
    with pytest.raises(InvalidSamplingParams) as caught:
        make()
    assert caught.value.field == field


def test_token_ids_are_kept_sorted_and_once():
    """Two collections with the same ids are the same parameters."""
    assert SamplingParams(xtc_exempt=[5, 2, 5]) == SamplingParams(xtc_exempt={2, 5})
    assert SamplingParams(dry_breakers=range(3)).dry_breakers == (0, 1, 2)


def test_parameters_are_frozen():
    """A running row's parameters cannot change under it."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().top_k = 3


def test_a_batch_mismatch_crosses_processes():
    """The error keeps its facts."""
    error = pickle.loads(pickle.dumps(BatchMismatch(3, 2)))
    assert (error.num_rows, error.num_samplers) == (3, 2)


def test_parameters_import_no_arrays():
    """The root, `SamplingParams` and seeds load without mlx, and every public name resolves."""
    code = (
        "import sys, headrace_sampling as s; s.SamplingParams(top_k=3); s.default_seed(); "
        "assert 'mlx' not in sys.modules; "
        "assert dir(s) == s.__all__ == sorted(s.__all__); [getattr(s, name) for name in s.__all__]"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
