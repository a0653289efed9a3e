"""What a run says of a metric whose one value for several samples may be their mean."""

import pytest
import torch
from tests.jobs.test_train import X, job_of, train


@pytest.mark.parametrize("size", [1, 2])
def test_classes_with_one_sample_in_a_share_are_no_means_and_a_mean_is(ranks, capfd, size):
    """As the guide has it: over all tallies of a run, those of epochs and of validations."""

    def by_class(output, target):
        right = (output.argmax(1) == target).float()
        return {f"accuracy_{c}": right[target == c] for c in target.unique().tolist()}

    def mean(output, target):
        return (output.argmax(1) == target).float().mean().view(1)

    data = X[:20], torch.arange(20) % 4
    more = {"shuffle": False, "batch_size": 4 * size, "data": data, "validation": data}
    run = train(ranks, job_of(metrics={"by_class": by_class}, **more), size)
    assert "one value" not in capfd.readouterr().err
    assert not any("one value" in line for line in run.record.notices)
    run = train(ranks, job_of(metrics={"mean": mean}, **more), size)
    (line,) = (line for line in run.record.notices if "one value" in line)
    assert line.startswith("metric 'mean' returned one value of shape (1,) for several samples")
