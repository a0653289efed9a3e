"""Who else hears of a run's figures: TensorBoard, Weights & Biases, MLflow, or any object with three methods."""

from kway.trackers.event_files import tensorboard
from kway.trackers.protocol import Tracker
from kway.trackers.services import mlflow, wandb

__all__ = ["Tracker", "mlflow", "tensorboard", "wandb"]
