"""``python -m mlxcel.testing.survey NAME``: one architecture's finding, as a JSON object."""

from __future__ import annotations

import json
import sys

import attrs

from mlxcel.plugins import Plugins
from mlxcel.testing.survey.check import survey

if __name__ == "__main__":
    print(json.dumps(attrs.asdict(survey(sys.argv[1], Plugins.discover()))))
