"""How contract suites compare arrays: relative L2 over a whole array, in float64."""

import jax
import numpy as np

NOTHING = 1e-30  # an array this small is zero: e^-100 against e^-10000


def relative_error(actual, expected) -> float:
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    if actual.size == 0:
        return 0.0
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), NOTHING))


def assert_agree(actual, expected, tolerances, names) -> None:
    """Each array of `actual` is within its tolerance; one number serves for all."""
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    tolerances = [tolerances] * len(errors) if isinstance(tolerances, float) else tolerances
    rows = zip(names, errors, tolerances, strict=True)
    wrong = {name: error for name, error, tolerance in rows if not error <= tolerance}
    assert not wrong, f"relative L2 errors {wrong} beyond {tolerances}"


def assert_finite(tree) -> None:
    assert all(np.isfinite(np.asarray(x).astype(np.float64)).all() for x in jax.tree.leaves(tree))


def cast(arrays, dtype, wide=()):
    """numpy arrays of `dtype`; those whose numbers are in `wide` of at least float32.

    numpy, because every new slice of a jax array is one more program to compile.
    """
    at_least = jax.numpy.promote_types(dtype, np.float32)
    dtype = jax.numpy.dtype(dtype)
    return tuple(np.asarray(x).astype(at_least if i in wide else dtype) for i, x in enumerate(arrays))


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)
