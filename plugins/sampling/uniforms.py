"""Uniform numbers addressed by (seed, position), so that a draw depends on nothing but its own request."""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt


def fresh_seed() -> int:
    """A seed for a request that named none, 0 to 2**63 - 1."""
    return secrets.randbits(63)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), float64 [n].

    Two rounds of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the first
    turns the seed into a stream's start, the second takes that stream's value at ``position``. Nothing is carried from
    draw to draw: neither the batch around a request nor a preemption can change what it draws.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64 by design
        streams = _mix(seeds + _GAMMA)
        bits = _mix(streams + _GAMMA * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
