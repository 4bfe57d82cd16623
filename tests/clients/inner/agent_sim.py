"""Runs agent-sim of cache-pressure on Python 3.11.

One of its lines has quotes inside a formatted text that only Python 3.12 can read.
"""

import importlib.util
import sys
import types

NAME = "cache_pressure.agent_sim"
READ_BY_312 = "f'{summary['main_reuse_pct']:.0f}%'"

spec = importlib.util.find_spec(NAME)
with open(spec.origin) as file:
    source = file.read()
assert READ_BY_312 in source, "the package has changed"
source = source.replace(READ_BY_312, "format(summary['main_reuse_pct'], '.0f') + '%'")
module = types.ModuleType(NAME)
sys.modules[NAME] = module
exec(compile(source, spec.origin, "exec"), module.__dict__)
module.main()
