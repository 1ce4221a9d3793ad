"""Runs the kernels' source uncompiled, under a scheduler that owns every step: see docs/internals/interleavings.md."""
