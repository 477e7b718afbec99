"""What is said of a model that failed before it was ready."""

from __future__ import annotations

import sys
import sysconfig
from types import ModuleType

import pytest

from edl_serving.backends import ModelSource, open_backends
from edl_serving.command_line.model_failure import describe_failure


def test_an_installed_model_s_stack_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("installed_model")
    file = f"{sysconfig.get_paths()['purelib']}/installed_model.py"
    code = compile("def predict(inputs):\n    return {'y': inputs['x'] @ inputs['x']}\n", file, "exec")
    exec(code, vars(module))  # noqa: S102 - code of a file that is not there
    monkeypatch.setitem(sys.modules, "installed_model", module)
    source = ModelSource("callable", "installed_model:predict", inputs=("x:float32[2]",), version="1")
    with pytest.raises(ValueError, match="matmul") as caught:
        open_backends(source)
    said = describe_failure(caught.value, source)
    assert "in predict" in said
    assert "it was called with zeros" in said
