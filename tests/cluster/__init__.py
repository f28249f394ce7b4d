"""Tests of loragraph.cluster."""
