"""Tests of one function that differ in their parameters share their ranks."""

import pytest

from tests.support.ranks import run_cases


@pytest.fixture(scope="module")
def known_outcomes():
    return {}


@pytest.fixture
def on_shared_ranks(request, known_outcomes):
    """run(function, num_ranks, case): what run_ranks(function, num_ranks, *case) would return, of this test's
    parameters.

    num_ranks(**parameters), case(**parameters). The first test runs the cases of all tests of its name that were asked
    for and take as many ranks, one after the other on one set of them.
    """
    def run(function, num_ranks, case):
        test, count = request.node.originalname, num_ranks(**request.node.callspec.params)
        if (test, count) not in known_outcomes:
            requested = {item.nodeid: item.callspec.params for item in request.session.items
                     if item.path == request.node.path and item.originalname == test}
            cases = {node: case(**parameters) for node,
                     parameters in requested.items() if num_ranks(**parameters) == count}
            known_outcomes[test, count] = dict(zip(cases, run_cases(function, count, list(cases.values()))))
        outcome = known_outcomes[test, count][request.node.nodeid]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    return run
