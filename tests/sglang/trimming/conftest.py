"""Settings of hypothesis, and tests that are coroutines."""

import asyncio
import inspect
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir

settings.register_profile("tests", deadline=None, database=None, print_blob=True)
# With a rule removed, a failing example needn't be shrunk.
settings.register_profile("mutations", settings.get_profile("tests"), phases=[Phase.generate])
settings.load_profile("tests")
# Hypothesis would keep its tables in the checkout.
set_hypothesis_home_dir(Path(sys.prefix) / "hypothesis")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.function
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
