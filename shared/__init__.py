"""The schema, the schedule compiler and verifier, the catalogue, and how results are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .basics.lazy_face import lazy_face

if TYPE_CHECKING:
    from .answers.search_result import SearchResult as SearchResult
    from .basics.errors import CalibrationError as CalibrationError
    from .basics.errors import CatalogueError as CatalogueError
    from .basics.errors import DeviceOutOfMemoryError as DeviceOutOfMemoryError
    from .basics.errors import FileError as FileError
    from .basics.errors import HardwareError as HardwareError
    from .basics.errors import InfeasibleError as InfeasibleError
    from .basics.errors import PlanError as PlanError
    from .basics.errors import ProtwinError as ProtwinError
    from .basics.errors import RanksError as RanksError
    from .basics.errors import ScheduleError as ScheduleError
    from .basics.errors import WorkloadError as WorkloadError
    from .basics.units import format_bytes as format_bytes
    from .basics.units import parse_bytes as parse_bytes
    from .catalogue.machines import load_hardware as load_hardware
    from .catalogue.machines import machine_names as machine_names
    from .catalogue.models import model_names as model_names
    from .compile.compile import compile_schedule as compile_schedule
    from .pipelines.pipeline import Pipeline as Pipeline
    from .pipelines.pipeline import Stage as Stage
    from .pipelines.prediction import PipelinePrediction as PipelinePrediction
    from .pipelines.split_search import SplitSearch as SplitSearch
    from .records.comparison import Comparison as Comparison
    from .records.comparison import compare_records as compare_records
    from .schema.calibration import Calibration as Calibration
    from .schema.hardware import Hardware as Hardware
    from .schema.plan import ActivationMode as ActivationMode
    from .schema.plan import ParallelMode as ParallelMode
    from .schema.plan import Plan as Plan
    from .schema.plan import TrainingMethod as TrainingMethod
    from .schema.question import Question as Question
    from .schema.record import Record as Record
    from .schema.schedule import Lane as Lane
    from .schema.schedule import Schedule as Schedule
    from .schema.schedule import TaskKind as TaskKind
    from .schema.training_options import TrainingOptions as TrainingOptions
    from .schema.workload import DType as DType
    from .schema.workload import Workload as Workload
    from .students.student import Student as Student
    from .tables.explain import explain_plan as explain_plan
    from .verify.guaranteed_peak import guaranteed_device_peak as guaranteed_device_peak
    from .verify.verify import verify_schedule as verify_schedule
    from .workloads.bypass import bypass_workload as bypass_workload
    from .workloads.source import load_workload as load_workload

_HOMES = {
    "ActivationMode": "schema.plan",
    "Calibration": "schema.calibration",
    "CalibrationError": "basics.errors",
    "CatalogueError": "basics.errors",
    "Comparison": "records.comparison",
    "DType": "schema.workload",
    "DeviceOutOfMemoryError": "basics.errors",
    "FileError": "basics.errors",
    "Hardware": "schema.hardware",
    "HardwareError": "basics.errors",
    "InfeasibleError": "basics.errors",
    "Lane": "schema.schedule",
    "ParallelMode": "schema.plan",
    "Pipeline": "pipelines.pipeline",
    "PipelinePrediction": "pipelines.prediction",
    "Plan": "schema.plan",
    "PlanError": "basics.errors",
    "ProtwinError": "basics.errors",
    "Question": "schema.question",
    "RanksError": "basics.errors",
    "Record": "schema.record",
    "Schedule": "schema.schedule",
    "ScheduleError": "basics.errors",
    "SearchResult": "answers.search_result",
    "SplitSearch": "pipelines.split_search",
    "Stage": "pipelines.pipeline",
    "Student": "students.student",
    "TaskKind": "schema.schedule",
    "TrainingMethod": "schema.plan",
    "TrainingOptions": "schema.training_options",
    "Workload": "schema.workload",
    "WorkloadError": "basics.errors",
    "bypass_workload": "workloads.bypass",
    "compare_records": "records.comparison",
    "compile_schedule": "compile.compile",
    "explain_plan": "tables.explain",
    "format_bytes": "basics.units",
    "guaranteed_device_peak": "verify.guaranteed_peak",
    "load_hardware": "catalogue.machines",
    "load_workload": "workloads.source",
    "machine_names": "catalogue.machines",
    "model_names": "catalogue.models",
    "parse_bytes": "basics.units",
    "verify_schedule": "verify.verify",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_face(__name__, _HOMES)
