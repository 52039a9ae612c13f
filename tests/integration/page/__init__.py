"""Tests of the page in Chromium. A package, so that its fixtures end with it."""
