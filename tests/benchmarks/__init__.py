"""Tests of benchmarks whose figures are not measured but computed."""
