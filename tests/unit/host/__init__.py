"""Tests of the host side: client, launcher and faults. A package, so that its fixtures end with it."""
