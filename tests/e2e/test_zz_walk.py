import pytest
from pathlib import Path
from mlxcel.testing import tiny as checkpoints
from mlxcel.tensor.options import TensorParallel
@pytest.fixture(scope="module")
def mesh(make_cluster, models):
    return make_cluster([models] * 4, "--blas", "wheel")
@pytest.mark.parametrize("name", checkpoints.names())
def test_walk(mesh, models, walk, name):
    folder = models / name
    assert walk.through(mesh, folder, 2, TensorParallel(2)) == walk.alone(folder)
