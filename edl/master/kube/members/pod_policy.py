"""Limits on pod templates: service accounts, and everything that reaches beyond a container.

The operator creates pods with its own permissions, for authors of jobs who may lack permission to create pods. So it
accepts only the service accounts that it was told to accept, and by default nothing that Pod Security's level
"baseline" forbids: https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from edl.errors import SettingsError
from edl.master.kube.members.pods import get_list, get_mapping, get_text
from edl.master.kube.resources import MemberOwner, SpecProblem
from edl.quoting import shown

PodSecurity = Literal["baseline", "privileged"]

_OWN_ACCOUNTS: Final = frozenset({"edl-operator", "edl-dashboard"})
"""Names of the chart's service accounts: a job with one of these accounts would have EDL's own permissions."""
_CAPABILITIES: Final = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"),
        *("SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)
_SYSCTLS: Final = frozenset(
    {
        *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
        *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
        *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
        "net.ipv4.tcp_keepalive_probes",
    }
)
_SELINUX_TYPES: Final = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"


@dataclass(frozen=True)
class PodPolicy:
    """A Pod Security level, and allowed service accounts (`NAME`, `NAMESPACE/NAME`); SettingsError if invalid."""

    level: PodSecurity = "baseline"
    service_accounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in get_args(PodSecurity):
            raise SettingsError(f"--pod-security {self.level!r}: expected {' or '.join(get_args(PodSecurity))}")
        for account in self.service_accounts:
            namespace, slash, name = account.rpartition("/")
            if not name or (slash and not namespace) or "/" in namespace:
                raise SettingsError(f"--allow-service-account {account!r}: expected NAME or NAMESPACE/NAME")
            if name in _OWN_ACCOUNTS:
                raise SettingsError(f"--allow-service-account {account}: that is EDL's own, with access to all jobs")

    def find_problems(self, owner: MemberOwner) -> tuple[SpecProblem, ...]:
        metadata, spec = get_mapping(owner.template, "metadata"), get_mapping(owner.template, "spec")
        found = []
        named = get_text(spec, "serviceAccountName") or get_text(spec, "serviceAccount")
        account = named or "default"
        if (named or _uses_token(spec)) and not self._allows(owner.namespace, account):
            text = f"its pods would act as service account {shown(account)}: ask the cluster's administrator for"
            found.append(f"{text} --allow-service-account {shown(f'{owner.namespace}/{account}')}")
        if get_mapping(metadata, "labels").get("app.kubernetes.io/name") == "edl":
            found.append("spec.template has the label app.kubernetes.io/name: edl, by which EDL selects its own pods")
        if self.level == "baseline" and (excess := list(_find_excess(spec, get_mapping(metadata, "annotations")))):
            text = "which Pod Security's baseline forbids: leave it out, or ask the cluster's administrator for"
            found.append(f"spec.template has {', '.join(excess)}, {text} --pod-security privileged")
        return tuple(SpecProblem("PodNotAllowed", text) for text in found)

    def _allows(self, namespace: str, account: str) -> bool:
        return account not in _OWN_ACCOUNTS and bool({account, f"{namespace}/{account}"} & {*self.service_accounts})


def _uses_token(spec: Mapping[str, Any]) -> bool:
    """Whether a template that specifies no account still gets the token of the namespace's default account."""
    sources = [
        source for volume in get_list(spec, "volumes") for source in get_list(volume.get("projected"), "sources")
    ]
    return bool(spec.get("automountServiceAccountToken")) or any("serviceAccountToken" in source for source in sources)


def _find_excess(spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in get_list(spec, "volumes"):
        if volume.get("hostPath") is not None:
            yield f"a hostPath volume ({shown(get_text(volume, 'name'))})"
    context = get_mapping(spec, "securityContext")
    for sysctl in get_list(context, "sysctls"):
        if sysctl.get("name") not in _SYSCTLS:
            yield f"sysctl {shown(get_text(sysctl, 'name'))}"
    yield from _find_excess_of_context(context)
    for name, value in annotations.items():
        if name.startswith(_APPARMOR) and not str(value).startswith(("runtime/default", "localhost/")):
            yield f"AppArmor profile {shown(str(value))}"
    for container in (*get_list(spec, "containers"), *get_list(spec, "initContainers")):
        context = get_mapping(container, "securityContext")
        if context.get("privileged"):
            yield "a privileged container"
        added = get_mapping(context, "capabilities").get("add")
        for capability in added if isinstance(added, list) else []:
            if capability not in _CAPABILITIES:
                yield f"capability {shown(str(capability))}"
        if context.get("procMount") not in (None, "", "Default"):
            yield f"procMount {shown(str(context['procMount']))}"
        if any(port.get("hostPort") for port in get_list(container, "ports")):
            yield "a hostPort"
        yield from _find_excess_of_context(context)


def _find_excess_of_context(context: Mapping[str, Any]) -> Iterator[str]:
    linux, windows = get_mapping(context, "seLinuxOptions"), get_mapping(context, "windowsOptions")
    if windows.get("hostProcess"):
        yield "windowsOptions.hostProcess"
    if linux.get("user") or linux.get("role") or (linux.get("type") or "") not in _SELINUX_TYPES:
        yield "seLinuxOptions"
    for kind in ("seccompProfile", "appArmorProfile"):
        if get_mapping(context, kind).get("type") == "Unconfined":
            yield f"{kind} Unconfined"
