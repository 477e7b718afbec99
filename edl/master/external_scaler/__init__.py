"""KEDA's external scaler: tells whoever scales pods how many teachers of a service, or workers of a job, are wanted.

The numbers are those that advisors write (`edl.load_reporting.wanted`). What does not belong here: how they are found
(`edl.master.scaling`), and scaling anything (`edl.master.kube`).
"""

from edl.master.external_scaler.server import ExternalScalerServer, ExternalScalerSettings

__all__ = ["ExternalScalerServer", "ExternalScalerSettings"]
