"""What a step costs: pure functions from a workload, measurements and the sizes of a layout to seconds and bytes."""
