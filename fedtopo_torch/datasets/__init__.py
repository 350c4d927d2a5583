"""Built-in federations; importing this package registers them by name."""

from .base import Dataset
from .fed_heart_disease import FedHeartDisease
from .folder import Folder, FolderSummary, folder_dataset
from .label_skew import LabelSkew
from .partitions import classes_partition, dirichlet_partition, iid_partition
from .synthetic import Synthetic

__all__ = [
    "Dataset",
    "FedHeartDisease",
    "Folder",
    "FolderSummary",
    "LabelSkew",
    "Synthetic",
    "classes_partition",
    "dirichlet_partition",
    "folder_dataset",
    "iid_partition",
]
