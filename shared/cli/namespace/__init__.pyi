from protwin import calibration as calibration
from protwin import runtime as runtime
from protwin import shared as shared
from protwin import sim as sim
from protwin.calibration import Trained as Trained
from protwin.calibration import plan as plan
from protwin.calibration import train as train
