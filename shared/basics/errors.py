"""The errors that a user can cause.  Each is one message: fact, values with units, the bound, what to do."""

from __future__ import annotations


class ProtwinError(Exception):
    """A mistake that the user can mend.  The command line prints it as one message and exits with code 2."""


class FileError(ProtwinError):
    """A file is missing, damaged, foreign, stale or written by a newer version."""


class CatalogueError(ProtwinError):
    """A model or machine that the catalogue does not hold."""


class WorkloadError(ProtwinError):
    """A model or batch that cannot be traced, or a workload that contradicts itself."""


class HardwareError(ProtwinError):
    """A machine description that is impossible or incomplete."""


class PlanError(ProtwinError):
    """A plan that its workload cannot follow."""


class InfeasibleError(PlanError):
    """No plan fits; the message says which limit binds, by how much, and names the closest plan."""


class ScheduleError(ProtwinError):
    """A schedule that the verifier rejects, or a model that leaves its schedule at run time."""


class CalibrationError(ProtwinError):
    """A calibration that does not fit the machine or the data."""


class DeviceOutOfMemoryError(ProtwinError):
    """The device's enforced budget is exceeded."""
