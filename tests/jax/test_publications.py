"""Trees of JAX arrays as publications."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

import multiverso as mv


def test_a_tree_is_read_without_a_copy() -> None:
    name = f"of-test-{os.urandom(8).hex()}"
    tree = {
        "dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "half": jnp.ones(3, jnp.bfloat16)},
        "steps": [jnp.int32(5)],
    }
    with mv.Publication(name, like=tree, slots=2) as publication, mv.subscribe(name) as subscription:
        publication.publish(tree)
        with subscription.latest() as snapshot:
            arrays = snapshot.jax()
            place = snapshot["dense.kernel"].__array_interface__["data"][0]
        assert arrays["dense.kernel"].unsafe_buffer_pointer() == place
        for key, leaf in (("dense.kernel", tree["dense"]["kernel"]), ("dense.half", tree["dense"]["half"])):
            assert arrays[key].dtype == leaf.dtype
            np.testing.assert_array_equal(arrays[key], leaf)
        assert int(arrays["steps.0"]) == 5
        publication.publish(jax.tree.map(lambda leaf: leaf + 1, tree))
        assert publication.publish(tree) is None, "the arrays keep the first version"
        np.testing.assert_array_equal(arrays["dense.kernel"], tree["dense"]["kernel"])
        del arrays, snapshot
        assert publication.publish(tree) == 3
