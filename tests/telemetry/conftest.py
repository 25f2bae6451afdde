"""The dataset that runs are made on."""

from tests.trainer.conftest import data as data
