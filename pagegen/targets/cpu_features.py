"""What the CPU of this machine can do, as Linux tells it."""

from __future__ import annotations

import functools
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# What x86's list tells beside instructions that a compiler uses: how the clock, caches, interrupts, virtual machines
# and mitigations behave, which differs between kernels and hosts of one CPU. A name that is not here counts as an
# instruction.
_NO_INSTRUCTIONS = re.compile(
    r"acpi|aperfmperf|apic|arat|arch_\w+|art|bts|cat_\w+|cdp_\w+|cmp_legacy|constant_tsc|cpb|cppc|cpuid\w*|cqm\w*"
    r"|cr8_legacy|dca|debug_swap|decodeassists|de|ds_cpl|dtes64|dtherm|dts|epb|ept\w*|erms|est|extapic|extd_apicid"
    r"|flexpriority|flush_l1d|flushbyasid|fsrm|ht|hw_pstate|hwp\w*|hypervisor|ibpb\w*|ibrs\w*|ibs|ida|intel_p\w+"
    r"|invpcid\w*|irperf|lbrv|mba|mca|mce|md_clear|misalignsse|monitor|mp|msr|mtrr|mwaitx|nonstop_tsc\w*|nopl"
    r"|npt|nrip_save|nx|osvw|overflow_recov|pat|pausefilter|pbe|pcid|pdcm|pdpe1gb|pebs|perfctr_\w+|perfmon_v2"
    r"|pfthreshold|pge|pln|proc_feedback|pse|pse36|pti|pts|rdt_a|rep_good|rrsba\w*|sev\w*|skinit|smap|smca|sme|smep"
    r"|smx|ss|ssbd|stibp\w*|succor|svm\w*|syscall|tce|tm|tm2|topoext|tpr_shadow|tsc\w*|umip|v_\w+|vgif|virt_ssbd"
    r"|vmcb_clean|vme|vmmcall|vmx|vnmi|vpid|wdt|x2apic|x2avic|xtopology|xtpr"
)


@functools.cache
def names() -> tuple[str, ...]:
    """The names of features that the kernel reports for the first CPU ("avx2"), sorted; () where unknown."""
    if not CPUINFO.exists():
        return ()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(sorted(set(found[1].split()))) if found else ()


def instructions() -> tuple[str, ...]:
    """Those of `names` that code compiled for this CPU may need: all but what is known to be no instruction."""
    return tuple(name for name in names() if not _NO_INSTRUCTIONS.fullmatch(name))
