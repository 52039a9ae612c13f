"""Tests of the documents, the packaging, start.py and the tests' own tools."""
