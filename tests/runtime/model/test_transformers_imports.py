"""Shortcuts of importing transformers leave nothing behind that differs from importing it."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(code: str) -> None:
    """Carry out ``code`` in a process that has imported nothing yet."""
    source = textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_the_models_of_transformers_are_those_that_reading_their_folders_again_finds() -> None:
    run("""
        from protwin.runtime.model.transformers_imports import import_transformers
        import_transformers()
        from transformers import models
        from transformers.utils import import_utils
        reader = import_utils.create_import_structure_from_path
        assert reader.__module__ == import_utils.__name__, "undone"
        reader.cache_clear()
        import_utils.define_import_structure.cache_clear()
        structure = import_utils.define_import_structure(models.__file__)
        again = import_utils._LazyModule("models", models.__file__, structure)
        assert len(again._class_to_module) > 1000
        assert again._class_to_module == models._class_to_module
        assert again._modules == models._modules
        assert import_transformers().models is models
    """)


def test_scipy_is_imported_when_its_function_is_called_and_not_before() -> None:
    run("""
        import sys
        from protwin.runtime.model.transformers_imports import without_optimizers
        with without_optimizers():
            from scipy.optimize import linear_sum_assignment as deferred
            assert "scipy.linalg" not in sys.modules
        assert "scipy.optimize" not in sys.modules
        rows, columns = deferred([[4, 1], [2, 3]])
        assert columns.tolist() == [1, 0]
        import scipy.optimize
        assert scipy.optimize.linear_sum_assignment is not deferred
        with without_optimizers():
            assert sys.modules["scipy.optimize"] is scipy.optimize, "what is there stays"
    """)


def test_whatever_else_is_asked_of_scipy_is_the_real_thing() -> None:
    run("""
        import sys
        from protwin.runtime.model.transformers_imports import without_optimizers
        with without_optimizers():
            from scipy.optimize import linear_sum_assignment, minimize
        import scipy.optimize
        assert sys.modules["scipy.optimize"] is scipy.optimize
        assert minimize is scipy.optimize.minimize
    """)


def test_building_a_model_imports_no_optimizers_of_scipy() -> None:
    run("""
        import sys
        import torch
        from protwin.runtime.model.configurations import build_model
        shape = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
        build_model({"model_type": "gpt2", **shape}, "small", torch.float32)
        assert "scipy.optimize" not in sys.modules
    """)
