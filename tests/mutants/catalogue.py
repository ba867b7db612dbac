"""The mutants: one small mutation each, the tests that must notice it, and the promise that it breaks.

`file` is a name that only one source file has, wherever it lies. `old` must be in it exactly once, in
any indentation and with any line breaks. `tests` are arguments of pytest, after environment
variables; the narrower they are, the sooner a mutant dies. docs/testing.md says which promises they
belong to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

SOURCES = ("ngn_kernels", "csrc")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    breaks: str
    equivalent: str = ""  # why no test can notice it; such a one is not run

    @property
    def native(self) -> bool:
        """Whether the extension must be built for it."""
        return not self.file.endswith(".py")

    def path(self, root: Path) -> Path:
        found = [path for source in SOURCES for path in (root / source).rglob(self.file)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} source files are named {self.file}")
        return found[0]

    def applied(self, text: str) -> str:
        """The mutated source."""
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        mutated, count = re.subn(pattern, lambda match: self.new.strip(), text)
        if count != 1:
            raise LookupError(f"{self.file} has its text {count} times")
        return mutated


def of(file: str, *rows: tuple[str, ...]) -> tuple[Mutant, ...]:
    """Rows of (name, old, new, tests, breaks), and perhaps why it is equivalent."""
    return tuple(Mutant(row[0], file, *row[1:]) for row in rows)


INTERPRETED = "TRITON_INTERPRET=1 --backend triton "
PYTHON_SIGNATURE = "--signature python "
BUCKETS = "tests/test_buckets.py"
ROUGH = "tests/test_rough_handling.py"
TARGET = "tests/test_target.py"
SAME_INSTRUCTIONS = (
    "Triton 3.7.1 puts this barrier there by itself: test_a_missing_barrier_is_a_race holds that the "
    "instructions are the same, and test_every_barrier_is_needed takes it out of them"
)

RULES = of(
    "rules.py",
    (
        "rules-norm-of-coordinate-rules",
        "if clipping and (self.coordinate or self.rms) else own",
        "if clipping and self.rms and own else own",
        "tests/test_atomic.py -k 'test_non_finite_norm_when_clipping and NGND'",
        "clipping needs the norm of coordinate rules before their first write",
    ),
    (
        "rules-norm-before-the-rms-sum",
        "return (NORM, *own) if clipping",
        "return (*own, NORM) if clipping",
        "tests/test_amp.py tests/test_triton_launches.py tests/test_properties.py -k 'any_problem and v1'",
        "D depends on the clipped gradient, so the norm comes first",
    ),
    (
        "rules-reads-of-W",
        "return _present(g=True, v=self.rms, x=self.regularised)",
        "return _present(g=True, v=self.rms, x=False)",
        "tests/test_bench_parts.py -k traffic_of_the_rules",
        "a rule tells every column that its sums read",
    ),
)

PLAN = of(
    "plan.py",
    (
        "plan-sums-of-a-device-not-shared",
        "if source is not target:",
        "if False:",
        f"{BUCKETS} -k 'devices and NGNM'",
        "devices share one denominator",
    ),
    (
        "plan-reasons-of-a-device-not-shared",
        "torch.maximum(home, copy_to(torch.empty_like(home), reason), out=home)",
        "pass",
        f"{BUCKETS} -k 'devices and NGNM'",
        "a reason on another device counts the step at home",
    ),
    (
        "plan-reason-stays-on-its-device",
        "            reason.zero_()\n",
        "",
        f"{BUCKETS} -k 'devices and NGNM'",
        "a skipped step of another device is counted once",
    ),
    (
        "plan-unusual-gradients-of-one-bucket",
        "for bucket in self.buckets: bucket.lay_out_gradients()",
        "for bucket in self.buckets[:1]: bucket.lay_out_gradients()",
        f"{BUCKETS} -k unusual",
        "gradients of every bucket are brought into shape",
    ),
    (
        "plan-parameter-not-written-back",
        "                row.local.copy_(row.dense)\n",
        "                pass\n",
        "tests/test_layouts.py -k 'test_parameter_and_gradient_layouts and float32'",
        "a parameter with gaps in memory is updated",
    ),
    (
        "plan-idle-parameter-written-back",
        "            if address[0] != 0:  # one without a gradient is left alone\n",
        "            if True:\n",
        "tests/test_layouts.py -k 'left_alone and NGNM'",
        "a parameter with gaps in memory and no gradient is left alone",
    ),
    (
        "plan-growth-overlaps",
        "and not apart(known.buckets, written):",
        "and False:",
        "tests/test_plans.py -k overlap",
        "a parameter that joins shares no memory with those that are there",
    ),
    (
        "plan-always-built-anew",
        "self.has_grown = fits and seen == GROWN",
        "self.has_grown = False",
        "tests/test_plans.py -k bits",
        "a parameter that joins costs no new plan of all the others",
    ),
    (
        "optimizer-last-on-the-wrong-bucket",
        "last=prepared is self._at_home[0]",
        "last=prepared is self._at_home[-1]",
        f"{BUCKETS} -k 'skips and NGNM and not devices'",
        "a skipped step is counted after all buckets have spoken",
    ),
    (
        "optimizer-skips-counted-per-bucket",
        "last=prepared is self._at_home[0]",
        "last=True",
        f"{BUCKETS} -k 'skips and NGNM and not devices'",
        "a skipped step is counted once",
    ),
    (
        "optimizer-reasons-not-asked-for",
        "            self._share_reasons()\n",
        "            pass\n",
        f"{BUCKETS} -k 'devices and NGNM'",
        "a reason on another device counts the step",
    ),
    (
        "optimizer-sums-not-shared",
        "copy_to(target[index], source[index])",
        "pass",
        f"{BUCKETS} -k 'devices and NGNM'",
        "devices share one denominator",
    ),
    (
        "plan-home-without-buckets",
        "if not self._at_home:",
        "if False:",
        f"{BUCKETS} -k 'devices and NGNM'",
        "a step is counted and told also where the home device has no bucket",
    ),
    (
        "plan-of-another-group",
        "        return self._process_group() is process_group\n",
        "        return True\n",
        "tests/ranks/test_troubles.py -k come_and_go",
        "a plan is of the process group that it was made for",
    ),
    (
        "plan-of-no-group",
        "            return self._process_group is process_group\n",
        "            return True\n",
        "tests/ranks/test_troubles.py -k come_and_go",
        "a plan of a process alone is not one of several ranks",
    ),
    (
        "plan-group-sums-in-its-own",
        "self.totals = self.sums if alone else [torch.zeros_like(s) for s in self.sums]",
        "self.totals = self.sums",
        "tests/ranks/test_troubles.py -k 'sends_nothing_of_the_others and NGNM'",
        "numbers of a rank and of all ranks never share memory",
    ),
    (
        "plan-misplaced-gradients-unseen",
        "return any(not same_placement(row.param.grad, row.param) for row in rows)",
        "return False",
        "tests/ranks/test_troubles.py -k 'raise_together and 2 and partial'",
        "a rank with an error does not leave others in a collective of their gradients",
    ),
    (
        "plan-misplaced-tensors-of-a-draft-unseen",
        "            misplaced |= any(",
        "            any(",
        "tests/ranks/test_troubles.py -k 'raise_together and 2 and partial and new'",
        "nor one of a new plan",
    ),
)

SIGNATURE = of(
    "signature.py",
    (
        "signature-python-ignores-state",
        "tensors = [row.param, *(row.state.get(key) for key in row.keys)]",
        "tensors = [row.param]",
        f"{ROUGH} -k 'test_state_memory_replaced and python'",
        "state that was replaced is seen, by older torch too",
    ),
    (
        "signature-python-ignores-the-state-dict",
        "key is known and value is kept",
        "key is known",
        f"{ROUGH} -k 'a_new_dict_of_state and python'",
        "a state dict that was replaced is seen",
    ),
    (
        "signature-python-gradient-device",
        "        and grad.device == row.dense.device\n",
        "",
        "tests/test_signature.py -k another_device",
        "a gradient on another device is looked at closely",
    ),
    (
        "signature-python-idle-parameters",
        "            and all(param.grad is None for param in self._idle)\n",
        "",
        PYTHON_SIGNATURE + "tests/test_contract.py -k frozen",
        "a parameter whose first gradient comes late joins in",
    ),
    (
        "signature-python-negated-gradients",
        "        and not grad.is_neg()\n",
        "",
        PYTHON_SIGNATURE + "tests/test_bad_input.py -k lazily_negated",
        "a lazily negated gradient is taken for what it is",
    ),
    (
        "signature-python-keeps-gradients",
        "def release(self) -> None: self._gradients = []",
        "def release(self) -> None: pass",
        f"{ROUGH} -k 'gradients_are_let_go and python'",
        "no gradient outlives its step here",
    ),
    (
        "signature-python-memory-order",
        "        and same_order(grad, row.dense)\n",
        "",
        PYTHON_SIGNATURE
        + "tests/test_layouts.py -k 'test_parameter_and_gradient_layouts and float32'",
        "gradients in any memory order",
    ),
)

NATIVE_SIGNATURE = of(
    "signature.h",
    (
        "signature-native-gradient-device",
        "!(t.device == place.device) || ",
        "",
        "tests/test_signature.py -k another_device",
        "a gradient on another device is looked at closely",
    ),
    (
        "signature-native-state-address",
        "      if (tensor.address() != state.address) return true;\n",
        "",
        f"{ROUGH} -k 'test_state_memory_replaced and native'",
        "state whose memory was replaced is seen",
    ),
    (
        "signature-native-state-dict",
        "if (key != states_[i].ptr() || value != states_[i + 1].ptr()) return false;",
        "if (key != states_[i].ptr()) return false;",
        f"{ROUGH} -k 'a_new_dict_of_state and native'",
        "a state dict that was replaced is seen",
    ),
    (
        "signature-native-idle-parameters",
        "grown = !gradient_of(idle_[i]).is_none();",
        "grown = false;",
        "tests/test_contract.py -k frozen",
        "a parameter whose first gradient comes late joins in",
    ),
    (
        "signature-native-memory-order",
        "      if (t.shape[d] != 1 && t.strides[d] != extent[1]) return false;\n",
        "",
        "tests/test_layouts.py -k 'test_parameter_and_gradient_layouts and float32'",
        "gradients in any memory order",
    ),
    (
        "signature-native-negated-gradients",
        "    if (row.may_be_negated && is_negated(grad)) return UNUSUAL_ADDRESS;\n",
        "",
        "tests/test_bad_input.py -k lazily_negated",
        "a lazily negated gradient is taken for what it is",
    ),
    (
        "signature-native-conjugated-gradients",
        "    if (row.gradient_type.code == dlpack::COMPLEX) return UNUSUAL_ADDRESS;",
        "",
        "tests/test_layouts.py -k conjugate",
        "a lazily conjugated gradient is taken for what it is",
    ),
    (
        "signature-native-groups-in-tuples",
        "    PyObject* fast = PySequence_Fast(iterable,",
        "    PyObject* fast = PyTuple_Check(iterable) ? PyList_New(0) : PySequence_Fast(iterable,",
        "tests/test_checkpoints.py -k 'in_tuples and native and NGNM'",
        "groups may be tuples",
    ),
    (
        "signature-native-places-of-new-rows",
        "slots_[i] = slots.at(static_cast<size_t>(places.at(i)));",
        "slots_[i] = slots.at(i);",
        "tests/test_plans.py",
        "gradients belong to their parameters after others have joined",
    ),
    (
        "signature-native-keeps-gradients",
        "for (py::object& gradient : gradients_) gradient = py::object();",
        "",
        f"{ROUGH} -k 'gradients_are_let_go and native'",
        "no gradient outlives its step here",
    ),
)

OPTIMIZER = of(
    "optimizer.py",
    (
        "optimizer-pickle-loses-the-skipped-count",
        '"_skipped_before": int(self.skipped_steps),',
        '"_skipped_before": 0,',
        "tests/test_checkpoints.py -k count_of_skipped",
        "copies and pickles know how many steps were skipped",
    ),
    (
        "optimizer-loading-loses-the-skipped-count",
        'self._skipped_before += loaded.options["skipped_steps"] - int(self.skipped_steps)',
        "pass",
        "tests/test_checkpoints.py -k skipped_steps_is_restored",
        "a loaded run knows how many steps were skipped",
    ),
    (
        "optimizer-loading-adds-to-the-skipped-count",
        'options["skipped_steps"] - int(self.skipped_steps)',
        'options["skipped_steps"]',
        "tests/test_checkpoints.py -k skipped_steps_is_restored",
        "a loaded run has the count of the saved one",
    ),
    (
        "optimizer-other-options-in-silence",
        "if saved != mine:",
        "if False:",
        "tests/test_checkpoints.py -k options_that_differ",
        "options other than the saved ones are warned about",
    ),
    (
        "optimizer-own-keys-take-part",
        'or (known is None and "step" in self.state.get(param, ()))',
        "or (known is None and self.state.get(param))",
        "tests/test_checkpoints.py -k users_own_are_kept",
        "a parameter that never had a gradient takes no part, whatever its state holds",
    ),
    (
        "optimizer-lr-below-zero",
        "usable_lr(values[0], group, self.defaults)",
        "values[0]",
        "tests/test_schedulers.py -k rounded_to_below_zero",
        "no step size is negative",
    ),
    (
        "optimizer-pickle-loses-a-pending-loss",
        '"_pending": self._pending,',
        '"_pending": PendingLoss(),',
        "tests/test_loss.py -k a_copy_has_a_pending_loss",
        "copies and pickles carry a pending loss",
    ),
    (
        "optimizer-floor-not-raised-of",
        "math.isfinite(loss) and loss < self._loss_floor:",
        "math.isfinite(loss) and loss < 0.0:",
        "tests/test_atomic.py -k below_a_raised_floor",
        "a loss below its floor is an error",
    ),
    (
        "optimizer-momentum-forgets",
        "self._set_rule(self.rule.momentum) self._checked",
        "self._set_rule(False); self._checked",
        "tests/test_checkpoints.py -k momentum_is_off",
        "momentum stays on once a group has had some",
    ),
    (
        "optimizer-nothing-is-warned-of",
        "            self._warn_of(plan.home.report.poll_skip_reason())\n",
        "",
        "tests/test_atomic.py -k 'test_non_finite_loss and NGNM'",
        "no step is skipped in silence",
    ),
    (
        "optimizer-a-new-key-is-not-checked",
        "seen.append((lr, betas, others, values, len(group)))",
        "seen.append((lr, betas, others, values))",
        f"{ROUGH} -k values_of_other_algorithms",
        "values that an algorithm lacks are refused",
    ),
    (
        "optimizer-a-new-cap-is-not-seen",
        'values = group["weight_decay"], group["step_cap"]',
        'values = group["weight_decay"], None',
        f"{TARGET} -k 'set_later and cpu'",
        "a cap that is set later is used",
    ),
    (
        "optimizer-ranks-do-not-compare-targets",
        '"loss_target": self._loss_target,\n                "max_grad_norm": self._max_grad_norm,',
        '"max_grad_norm": self._max_grad_norm,',
        "tests/ranks/test_troubles.py -k 'raise_together and loss_target'",
        "ranks aim at the same loss",
    ),
    (
        "optimizer-ranks-do-not-compare-decay",
        '                "decay_form": self._decay_form,\n            }',
        "            }",
        "tests/ranks/test_troubles.py -k 'raise_together and decay_form'",
        "ranks decay alike",
    ),
    (
        "optimizer-a-copy-forgets-its-target",
        '            "_loss_target": self._loss_target,\n',
        '            "_loss_target": 0.0,\n',
        f"{TARGET} -k copies",
        "a copy has the options of its original",
    ),
    (
        "optimizer-backend-set-later",
        "        self._backend = name\n        self._plan = None\n",
        "        self._backend = name\n",
        f"{ROUGH} -k set_between_steps",
        "options that are set later are used",
    ),
    (
        "optimizer-dropped-plan",
        '        if "_backend" in state:',
        '        if False and "_backend" in state:',
        "tests/test_checkpoints.py -k deepcopy_and_pickle",
        "a copy has tables of its own",
    ),
    (
        "optimizer-rule-without-momentum-after-loading",
        'self._set_rule(any("momentum_buffer" in values for values in self.state.values()))',
        "self._set_rule(False)",
        "tests/test_checkpoints.py -k momentum_is_off",
        "a loaded run keeps its momentum while no group has any",
    ),
    (
        "optimizer-clipping-set-later",
        "and plan.clipping == (self._max_grad_norm is not None)",
        "",
        f"{ROUGH} -k set_between_steps",
        "options that are set later are used",
    ),
    (
        "optimizer-any-step-at-lr-0-creates-state",
        "return is_called_by(INITIALISES_STATE)",
        "return True",
        "tests/test_loss.py -k forgotten_during_warm_up",
        "a forgotten loss is noticed during warm-up",
    ),
    (
        "optimizer-agreement-of-older-parameters",
        "if plan is None or self._agreed",
        "if self._agreed",
        "tests/ranks/test_troubles.py -k 'raise_together and 2 and later'",
        "what ranks compare is that of this step's parameters",
    ),
)

BACKWARDS = "tests/test_backwards.py"
LOSS = of(
    "loss.py",
    (
        "loss-weights-not-added",
        "        self._weight += weight\n",
        "        self._weight = weight\n",
        "tests/test_loss.py -k weighted_mean",
        "set_loss makes a weighted mean",
    ),
    (
        "loss-add-is-a-mean",
        "        self._weight = 1.0\n",
        "",
        "tests/test_loss.py -k add_loss_is_a_sum",
        "add_loss makes a sum",
    ),
    (
        "loss-not-consumed",
        "        value = self._total / self._weight\n        self.clear()\n",
        "        value = self._total / self._weight\n",
        "tests/test_loss.py -k set_loss_is_consumed",
        "a pending loss serves one step",
    ),
    (
        "loss-of-a-failed-closure-stays",
        "            except BaseException:\n                self.clear()\n",
        "            except BaseException:\n",
        "tests/test_loss.py -k a_closure_that_fails",
        "a closure that fails leaves nothing pending",
    ),
    (
        "loss-outlives-its-gradients",
        "if self and (self._has_gradients or self._unused(groups)):",
        "if self and self._unused(groups):",
        f"{BACKWARDS} -k made_by_hand",
        "zero_grad() drops the loss of the gradients that it clears",
    ),
    (
        "loss-gradient-version",
        "return self.has(grad) and self._marks[id(grad)][1] == version(grad)",
        "return self.has(grad)",
        f"{BACKWARDS} -k by_hand_are_new",
        "a gradient that was added to is a new one",
    ),
    (
        "loss-closure-before-what-is-pending",
        "        if value is None and given is not None:\n",
        "        if given is not None:\n",
        "tests/test_loss.py -k pending_loss_goes_before",
        "a pending loss goes before what a closure returns",
    ),
    (
        "loss-of-a-step-without-gradients",
        "        self.drop_stale(groups, in_place=False)\n        if self._total is None:\n",
        "        if self._total is None:\n",
        f"{BACKWARDS} -k all_gradients_are_gone",
        "a loss whose gradients were thrown away is not taken by a step",
    ),
    (
        "loss-given-to-one-that-is-stale",
        "        self.drop_stale(groups)\n        if self._by",
        "        if self._by",
        f"{BACKWARDS} -k 'module_clears or reach_other_layers'",
        "a loss is not added to one whose gradients were thrown away",
    ),
    (
        "loss-of-other-layers-stays",
        "        return witness.grad is not None or any(",
        "        return True or any(",
        f"{BACKWARDS} -k reach_other_layers",
        "a loss goes with its gradients where the next batch makes others",
    ),
    (
        "loss-of-one-backward-by-a-closure",
        "        if by_closure and 0 < earlier < count:\n",
        "        if False:\n",
        f"{BACKWARDS} -k a_closure_returns_the_loss_of_one",
        "what a closure returns is not taken for the loss of backward() calls before it",
    ),
    (
        "loss-of-one-backward-unnoticed",
        "        if count < 2:\n",
        "        if True:\n",
        f"{BACKWARDS} -k 'warned_of_once or a_closure_returns'",
        "a loss of one of several backward() calls is warned of",
    ),
    (
        "loss-sums-are-warned-of",
        "loss.requires_grad and not self._warned",
        "not self._warned",
        f"{BACKWARDS} -k loops_that_are_right",
        "a detached sum is taken as it is",
    ),
    (
        "loss-warned-of-every-time",
        "            self._warned = True\n",
        "",
        f"{BACKWARDS} -k warned_of_once",
        "a loop is warned once",
    ),
    (
        "loss-beside-a-closure-refused",
        "            if returned is not None or self._total is not None:\n",
        "            if closure is not None or self._total is not None:\n",
        f"{BACKWARDS} -k beside_a_closure",
        "a loss counts beside a closure that returns None",
    ),
    (
        "loss-of-a-closure-beside-another",
        "            if returned is not None or self._total is not None:\n",
        "            if self._total is not None:\n",
        "tests/test_loss.py -k exactly_one_loss",
        "a step has one loss",
    ),
    (
        "loss-used-gradients-of-no-hooks",
        "self.backwards.witness(groups) if self.backwards.count else None",
        "self.backwards.witness(groups)",
        f"{BACKWARDS} -k beside_used_ones",
        "gradients that no hook has seen are told apart by their marks",
    ),
)

BACKWARD_COUNTER = of(
    "backwards.py",
    (
        "backwards-fresh-start-unseen",
        "if grad is None: self.discard() else: zeroed",
        "if grad is None: pass\n        else: zeroed",
        f"{BACKWARDS} -k 'module_clears or discarded_batches'",
        "gradients that were set to None are seen as thrown away",
    ),
    (
        "backwards-zeroed-in-place-unseen",
        "if zeroed: self.discard()",
        "if False: self.discard()",
        f"{BACKWARDS} -k 'module_clears or discarded_batches'",
        "gradients that were zeroed in place are seen as thrown away",
    ),
    (
        "backwards-changed-is-zeroed",
        "    return not grad.any()\n",
        "    return True\n",
        f"{BACKWARDS} -k clipped_in_place",
        "a gradient that was clipped keeps its loss",
    ),
    (
        "backwards-zero-is-zeroed",
        "if version(grad) == self._version or self._was_zero:",
        "if version(grad) == self._version:",
        f"{BACKWARDS} -k zero_is_not_one",
        "a gradient that is 0 and was changed in place is not taken for one that was cleared",
    ),
    (
        "backwards-unknown-is-counted",
        "elif zeroed is None:",
        "elif False:",
        f"{BACKWARDS} -k never_read",
        "where nobody knows whether gradients were cleared, no step is refused",
    ),
    (
        "backwards-dropped-layer-is-a-discard",
        "            gone: bool | None = not has_gradients(groups)\n",
        "            gone: bool | None = True\n",
        f"{BACKWARDS} -k gradients_of_one_layer",
        "the loss stays where the gradients of one layer are dropped",
    ),
    (
        "backwards-each-segment-is-counted",
        "        node = _outer_node()\n",
        "        node = None\n",
        f"{BACKWARDS} -k 'loops_that_are_right or checkpoints_inside'",
        "checkpoints inside a backward() are a part of it",
    ),
    (
        "backwards-each-accumulation-is-counted",
        "        if task < 0 or task != self._task:\n",
        "        if True:\n",
        f"{BACKWARDS} -k 'loops_that_are_right or checkpoints_inside'",
        "a parameter whose gradient is added to twice in a pass has had one pass",
    ),
    (
        "backwards-fsdp-starts-unseen",
        "            if self.present and mark is not self._grad:\n",
        "            if False:\n",
        f"{BACKWARDS} -k fsdp",
        "new gradients of FSDP2 are seen as new",
    ),
    (
        "backwards-fsdp-without-hooks",
        "        elif self._grad is not None and self._grad is not weakref.ref(grad):\n",
        "        elif False:\n",
        f"{BACKWARDS} -k fsdp",
        "new gradients of an FSDP2 that calls no hooks are seen as new",
    ),
    (
        "backwards-witness-goes-back",
        "current is not None and item[0] > self._place",
        "False",
        f"{BACKWARDS} -k chosen_once",
        "hooks come to rest on a parameter that every batch reaches",
    ),
    (
        "backwards-witness-stays",
        "        if current is not None and wanted(current):\n",
        "        if current is not None:\n",
        f"{BACKWARDS} -k 'chosen_once or frozen or reach_other_layers'",
        "another parameter is watched where this one gets no gradients",
    ),
    (
        "backwards-lost-hooks-unnoticed",
        "        lost = before if self._works else None",
        "        lost = None",
        f"{BACKWARDS} -k swapped",
        "a parameter that was swapped is watched again",
    ),
    (
        "backwards-hooks-stay",
        "    def __del__(self) -> None:\n        self._unhook()\n",
        "    def __del__(self) -> None:\n        pass\n",
        f"{BACKWARDS} -k two_hooks",
        "the hooks go with the optimizer",
    ),
    (
        "backwards-hooks-are-pickled",
        "        before.__torch_unserializable__ = True",
        "        before.other = True",
        f"{BACKWARDS} -k without_a_warning",
        "tensors with hooks are pickled without a warning",
    ),
    (
        "backwards-hooks-are-compiled",
        "@torch._disable_dynamo\ndef _after_accumulation",
        "def _after_accumulation",
        f"{BACKWARDS} -k compiled_code",
        "torch.compile does not compile the hooks, nor anything again because of them",
    ),
)

RANKS = of(
    "exchange.py",
    (
        "ranks-mean-over-all",
        "loss = loss / everyone[Message.WEIGHT]",
        "loss = loss / self.size",
        "tests/ranks/test_layouts.py -k 'pipeline-2 and NGNM'",
        "ranks without a loss have no say in its mean",
    ),
    (
        "ranks-overflow-not-shared",
        "        scalars[Input.FOUND_INF] = everyone[Message.FOUND_INF]\n",
        "",
        "tests/ranks/test_troubles.py -k 'skip_together and overflow and 2'",
        "an overflow on one rank skips the step on all",
    ),
    (
        "ranks-local-loss",
        "        scalars[Input.LOSS] = self._loss(received, everyone)\n",
        "",
        "tests/ranks/test_layouts.py -k 'ddp-2 and NGNMDv2'",
        "all ranks step with the mean of their losses",
    ),
    (
        "ranks-replicas-counted-twice",
        "replicas = self.replicas or size",
        "replicas = self.replicas or 1",
        "tests/ranks/test_layouts.py -k 'ddp-2 and NGNM'",
        "elements that lie on several ranks are counted once",
    ),
    (
        "ranks-meshes-counted-twice",
        "return mesh_replicas(param) * max(1, replicas // size)",
        "return mesh_replicas(param)",
        "tests/ranks/test_troubles.py -k by_hand",
        "elements that lie on several meshes are counted once",
    ),
    (
        "ranks-local-sums",
        "        plan.home_totals[0] = everyone[SUMS]\n",
        "        plan.home_totals[0] = added_up(plan.home_sums)\n",
        "tests/ranks/test_layouts.py -k 'fsdp2-2 and clipping and NGNM'",
        "sums and norm are those of the whole model",
    ),
    (
        "ranks-disagreement-not-seen",
        "if problem or apart is not None:",
        "if problem:",
        "tests/ranks/test_troubles.py -k 'raise_together and 2'",
        "ranks that disagree raise together",
    ),
    (
        "ranks-failing-one-sends-too-few",
        "        for _ in range(unread - 1):\n",
        "        for _ in range(0):\n",
        "tests/test_triton_launches.py -k 'bad_argument_on_a_gpu or on_one_rank_alone'",
        "a rank that raises on a GPU sends as many messages as others wait for",
    ),
    (
        "ranks-new-number-of-messages-unread",
        "news = index == 0 and",
        "news = False and",
        "tests/test_triton_launches.py -k 'on_one_rank_alone'",
        "hosts of GPUs look whether all ranks send as many messages",
    ),
    (
        "ranks-unready-ones-not-waited-for",
        "while self._check(rows):",
        "if self._check(rows) and False:",
        "tests/ranks/test_troubles.py -k 'only_some_ranks'",
        "ranks wait for the numbers of those with collectives of their own",
    ),
    (
        "ranks-empty-rank-stays-away",
        "if not exchange.combine(plan",
        "if plan.buckets and not exchange.combine(plan",
        "tests/ranks/test_troubles.py -k a_rank_with_nothing",
        "a rank with nothing to do takes part in the collective",
    ),
    (
        "optimizer-backends-not-compared",
        'items["the backend"] = ", ".join(',
        'items["the backend"] = ", ".join("")[:0] and (',
        "tests/ranks/test_troubles.py -k 'raise_together and 2 and backend'",
        "ranks compare their backends",
    ),
    (
        "ranks-values-not-compared",
        "if self.replicas is None: items",
        "if False: items",
        "tests/ranks/test_troubles.py -k 'raise_together and 2'",
        "replicas with other values raise",
    ),
) + of(
    "optimizer.py",
)

SHARDS = of(
    "dtensors.py",
    (
        "shards-copies-of-a-mesh",
        "            count *= spec.device_mesh.size(dimension)\n",
        "            count *= 1\n",
        "tests/ranks/test_layouts.py -k 'hsdp-4 and NGNM and not NGNMD'",
        "replicated dimensions of a mesh are counted once",
    ),
    (
        "shards-placements-ignored",
        "        tensor.device_mesh == other.device_mesh and tensor.placements == other.placements\n",
        "        tensor.device_mesh == other.device_mesh\n",
        "tests/ranks/test_troubles.py -k partial_gradients",
        "partial gradients are added up first",
    ),
)

STATE = of(
    "state.py",
    (
        "state-small-parameters",
        "param.numel() < SMALL",
        "param.numel() <= SMALL",
        "tests/test_narrow.py -k small",
        "parameters from 4,096 elements on have narrow state, smaller ones float32",
    ),
    (
        "state-format-not-restored",
        "        elif not is_in_place(state[key], param) or narrow_format(key, state[key].dtype) != form:\n",
        "        elif not is_in_place(state[key], param):\n",
        "tests/test_narrow.py -k brought_into_its_format",
        "state that was replaced is brought into its format",
    ),
    (
        "state-shape-not-checked",
        "        if tensor.shape != param.shape:\n",
        "        if False:\n",
        f"{ROUGH} -k 'bad_state_is_refused and shape and cpu and native'",
        "state that does not fit is refused",
    ),
    (
        "state-in-float32-for-float64",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
        "tests/test_checkpoints.py tests/test_properties.py -k 'any_problem and NGNM'",
        "state is never narrower than its parameter",
    ),
    (
        "state-lazy-conjugation",
        " and in_order and not part.is_conj()",
        " and in_order",
        f"{ROUGH} -k conjugate_state",
        "state that is lazily conjugated is taken for what it is",
    ),
    (
        "state-negative-zero",
        "values, torch.float32)).add_(0.0)  # which makes 0 of -0",
        "values, torch.float32))",
        "tests/test_narrow.py -k negative_zero",
        "a stored -0 becomes 0, and no huge number",
    ),
)

CHECKPOINT = of(
    "checkpoint.py",
    (
        "state-loaded-step-shared",
        'step_count(values["step"], param.device).clone()',
        'step_count(values["step"], param.device)',
        "tests/test_checkpoints.py -k the_copy_is_independent",
        "loaded state shares no memory with the file's",
    ),
    (
        "state-bad-numbers-are-loaded",
        "    if not (local(values).abs() <= form.limit).all():\n",
        "    if False:\n",
        "tests/test_narrow.py -k spoil_their_neighbours",
        "numbers that would spoil their neighbours are not loaded",
    ),
    (
        "state-negative-second-moment",
        '        if key == "exp_avg_sq" and (numbers < 0).any():\n',
        "        if False:\n",
        "tests/test_checkpoints.py -k 'no_step_stores and negative'",
        "numbers that no step stores are not loaded",
    ),
    (
        "state-non-finite-momentum",
        "        if not numbers.isfinite().all():\n",
        '        if key == "exp_avg_sq" and not numbers.isfinite().all():\n',
        "tests/test_checkpoints.py -k 'no_step_stores and nan'",
        "numbers that no step stores are not loaded",
    ),
    (
        "state-imaginary-parts-unchecked",
        "            numbers = torch.view_as_real(numbers.resolve_conj())\n",
        "            numbers = numbers.real\n",
        "tests/test_checkpoints.py -k 'no_step_stores and complex'",
        "numbers that no step stores are not loaded",
    ),
    (
        "state-negative-step",
        "math.isfinite(count) and count >= 0 and",
        "math.isfinite(count) and",
        "tests/test_checkpoints.py -k 'no_step_stores and step'",
        "numbers that no step stores are not loaded",
    ),
    (
        "state-half-a-step",
        " and count.is_integer()):",
        "):",
        "tests/test_checkpoints.py -k 'no_step_stores and step'",
        "numbers that no step stores are not loaded",
    ),
    (
        "state-own-keys-shared",
        "own = {k: copied(v) for",
        "own = {k: v for",
        "tests/test_checkpoints.py -k users_own_are_kept",
        "what the user keeps in the state is copied",
    ),
    (
        "state-other-columns-taken-for-own",
        '    reserved = {"step", *STATE_KEYS, *optional}\n',
        '    reserved = {"step", *STATE_KEYS} & known | optional\n',
        "tests/test_checkpoints.py -k none_of_the_users_own",
        "state of another optimizer is refused",
    ),
)

STEP_SIZE = of(
    "step_size.py",
    (
        "reference-aim",
        "return inputs.scalars[Input.AIM] * above",
        "return above",
        f"{TARGET} -k 'under_a_schedule and reference'",
        "a target takes its part off the loss",
    ),
    (
        "reference-cap",
        "largest = torch.where(capped, step_cap, lr)",
        "largest = lr",
        f"{TARGET} -k 'under_a_schedule and reference'",
        "rho is computed at the cap",
    ),
    (
        "reference-0-by-0",
        "rho = rho.masked_fill(denominator == 0, 1.0)",
        "rho = rho.masked_fill(denominator == 0, 0.0)",
        "tests/test_identities.py -k shrink_at_the_minimum",
        "rho is 1 where it would be 0/0",
    ),
    (
        "reference-clip-of-the-sum",
        "q = weighted if rule.rms else clip * clip * weighted",
        "q = weighted",
        "tests/test_properties.py -k 'any_problem and reference and NGNM'",
        "sums of clipped gradients",
    ),
    (
        "reference-negative-bracket",
        "torch.clamp(2 * h - alignment, min=0.0)",
        "(2 * h - alignment)",
        "tests/test_identities.py tests/test_conformance.py -k 'reference and NGNMDv1W and not gradients'",
        "rho is never negative",
    ),
    (
        "reference-last-reason-of-the-first-bucket",
        "torch.maximum(reason, new.reason, out=reason)",
        "reason.copy_(new.reason)",
        f"{BUCKETS} -k 'skips and reference'",
        "a reason of any bucket is told",
    ),
    (
        "reference-skips-not-counted",
        "skipped.add_(torch.sign(reason, out=new.skipped))",
        "torch.sign(reason, out=new.skipped)",
        "tests/test_atomic.py -k 'test_non_finite_loss and reference and NGNM'",
        "a skipped step is counted",
    ),
)

OPTIONS = of(
    "options.py",
    (
        "checks-any-lr-below-zero",
        "return 0.0 if lr >= -LR_ROUNDING * start else lr",
        "return 0.0",
        "tests/test_schedulers.py -k below_zero",
        "an lr that is negative by mistake is refused",
    ),
    (
        "checks-lr-rounding-of-the-default",
        'start = group.get("initial_lr", defaults["lr"])',
        'start = defaults["lr"]',
        "tests/test_schedulers.py -k below_zero",
        "an lr is rounded relative to what its schedule began with",
    ),
    (
        "checks-misspelt-names",
        "        if advice is None and near and near[0] not in name:",
        "        if False:",
        "tests/test_bad_input.py -k nobody_reads",
        "a misspelt option in a group is refused",
    ),
    (
        "checks-names-made-of-ours",
        " and near[0] not in name:",
        ":",
        "tests/test_bad_input.py -k users_own",
        "users may keep names of their own in groups",
    ),
)

ROWS = of(
    "rows.py",
    (
        "plan-real-sample-of-complex-gradients",
        "is_complex: self.key.grad.to_complex() if is_complex else self.key.grad\n",
        "is_complex: self.key.grad\n",
        "tests/test_bad_input.py -k 'is_complex_where and cpu'",
        "a complex parameter's gradient that turns real is refused",
    ),
    (
        "plan-rows-in-the-order-of-their-coming",
        "np.argsort([row.parameter_index for row in every])",
        "np.arange(len(every))",
        "tests/test_plans.py -k bits",
        "a plan that has grown sums in the order of one that is built anew",
    ),
    (
        "plan-type-of-the-gradient",
        "if local(row.param.grad).dtype.to_real() != self.key.grad:",
        "if False:",
        f"{BUCKETS} -k another_type",
        "a gradient of another type gets a plan of its own",
    ),
)

CPU_PY = of(
    "cpu.py",
    (
        "plan-autograd-not-told",
        "increment_version(params)",
        "pass",
        "tests/test_contract.py -k autograd_notices",
        "autograd notices what a kernel wrote",
    ),
)

FORMATS = of(
    "formats.py",
    (
        "formats-limit-of-bfloat16-m",
        "largest_below(BFLOAT16_LIMIT),",
        "LARGEST,",
        "tests/test_narrow.py -k cannot_hold",
        "what bfloat16 cannot hold is kept",
    ),
    (
        "formats-limit-of-bfloat16-v",
        "            largest_below(STOCHASTIC_BFLOAT16_LIMIT),\n",
        "            LARGEST,\n",
        "tests/test_narrow.py -k cannot_hold",
        "what bfloat16 cannot hold is kept",
    ),
    (
        "formats-limit-of-8-bit-m",
        "largest_below(INT8_LIMIT)",
        "LARGEST",
        "tests/test_narrow.py -k cannot_hold",
        "what a byte and its scale cannot hold is kept",
    ),
    (
        "formats-noise-of-the-window",
        " + count % WINDOW * STEP_STRIDE & WORD",
        " & WORD",
        "tests/test_narrow.py -k 'same_bits or noise_differs'",
        "noise is another one in every step",
    ),
    (
        "formats-nearest-second-moment",
        "lambda v, random: (stochastic_bfloat16(v, random), None),",
        "lambda v, random: (v.bfloat16(), None),",
        "tests/test_narrow.py -k 'same_bits or mean_over_steps'",
        "a second moment decays by less than half an ulp",
    ),
    (
        "formats-parameters-share-noise",
        "return random * GOLDEN & WORD",
        "return random",
        "tests/test_rounding.py -k backends_round",
        "parameters and v have noise of their own",
    ),
    (
        "formats-ties-of-a-split",
        "float_of(bits + 0x8000 >> 16 << 16 & WORD).bfloat16(), remainder",
        "value.bfloat16(), remainder",
        "tests/test_rounding.py -k 'split_numbers'",
        "a split number is joined with all its bits",
    ),
)

TABLES = of(
    "tables.py",
    (
        "tables-device-lr-copied-once",
        "self._values = None if device_lrs else values",
        "self._values = values",
        "tests/test_triton_launches.py -k lrs_on_the_device_are_copied",
        "an lr that lives on a GPU is read in every step",
    ),
    (
        "tables-gpu-warnings-never-reported",
        "        reason = self._read_counts(host.tolist())\n",
        "        reason = Reason.NONE\n",
        "tests/test_triton_launches.py -k 'warned_of_some_steps_later and NGNM'",
        "a skipped step on a GPU is warned of",
    ),
    (
        "tables-telemetry-lost-with-a-new-group",
        "        self.sizes.narrow(0, 0, shared).copy_(known.narrow(0, 0, shared))\n",
        "",
        f"{BUCKETS} -k telemetry",
        "step sizes of the last applied step stay when groups come",
    ),
    (
        "tables-captured-steps-ask",
        "        if is_capturing(self.device):\n            return Reason.NONE\n",
        "",
        "tests/test_triton_launches.py -k 'replayed_graphs'",
        "a captured step asks for no news",
    ),
    (
        "optimizer-found-inf-ignored",
        "0.0 if found_inf is None else found_inf, Input",
        "0.0, Input",
        "tests/test_amp.py -k 'found_inf and NGNM'",
        "a step that a GradScaler forbids is skipped",
    ),
    (
        "optimizer-grad-scale-ignored",
        "1.0 if grad_scale is None else grad_scale, Input",
        "1.0, Input",
        "tests/test_amp.py -k 'scaler_step and NGNM'",
        "scaled gradients are unscaled",
    ),
)

TRANSFER = of(
    "transfer.py",
    (
        "transfer-graphs-leave-other-numbers",
        "elif content != self._sent or self.in_graphs:",
        "elif content != self._sent:",
        "tests/test_triton_launches.py -k 'a_graph'",
        "an ordinary step after a replay sends its numbers again",
    ),
    (
        "transfer-memory-that-is-still-read",
        "next((slot for slot in self._slots if slot[1].query()), (None, None))",
        "next((slot for slot in self._slots), (None, None))",
        "tests/test_triton_launches.py -k pinned_memory",
        "pinned memory is not rewritten while it is read",
    ),
    (
        "transfer-not-sent-again",
        "        if content != self._sent:\n            self.target.copy_(",
        "        if self._sent is None:\n            self.target.copy_(",
        "tests/test_transfer.py",
        "numbers that changed are sent",
    ),
)

REFERENCE = of(
    "reference.py",
    (
        "reference-elements-not-kept",
        "yield Write(self.data, torch.where(go & fits, new, self.data))",
        "yield Write(self.data, torch.where(go, new, self.data))",
        "tests/test_atomic.py -k 'second_moment_overflow and reference'",
        "no non-finite number reaches the state",
    ),
    (
        "reference-skipped-steps-count",
        "            writes.append(Write(row.step, row.step + go))\n",
        "            writes.append(Write(row.step, row.step + 1))\n",
        "tests/test_atomic.py -k 'test_non_finite_loss and reference and NGNM'",
        "a skipped step leaves the step count alone",
    ),
    (
        "reference-curvature-at-1e-40",
        "larger = torch.maximum(c, two_h)",
        "larger = two_h",
        f"{ROUGH} -k 'at_the_edges and reference'",
        "coordinate steps at a loss of 1e-40",
    ),
    (
        "reference-copies-not-divided",
        "weighted_sum = weighted.sum(dtype=sums.dtype) / row.replicas",
        "weighted_sum = weighted.sum(dtype=sums.dtype)",
        "tests/ranks/test_layouts.py -k 'ddp-4 and NGNM and not NGNMD'",
        "elements that lie on several ranks are counted once",
    ),
    (
        "reference-erratum",
        "steps.largest * weight_decay * alignment.sum(dtype=sums.dtype) / row.replicas",
        "steps.effective * weight_decay * alignment.sum(dtype=sums.dtype) / row.replicas",
        "tests/test_identities.py -k erratum",
        "W as it is printed",
    ),
    (
        "reference-schedule-of-decay",
        "decay=weight_decay * (schedule * a),",
        "decay=weight_decay * a,",
        f"{TARGET} -k 'under_a_schedule and reference'",
        "a schedule scales the decay",
    ),
    (
        "reference-adamw-decay-enters-m",
        "    if not rule.adamw_decay:\n        m_new = m_new + decayed",
        "    m_new = m_new + decayed",
        "tests/test_decay_form.py -k 'test_steps and reference'",
        "AdamW's decay stays out of the momentum",
    ),
    (
        "reference-writes-row-by-row",
        "                writes += column.stored(value, fits, go)\n",
        "                for write in column.stored(value, fits, go):\n"
        "                    write.target.copy_(write.value)\n",
        "tests/test_atomic.py -k 'runs_out and reference'",
        "a step that runs out of memory changes no row",
    ),
)

RULE_H = of(
    "rule.h",
    (
        "rule-float32-momentum-under-float64",
        "if constexpr (MOMENTUM && (NARROW || sizeof(T) == 8)) least |= headroom(element.m, k.m_limit);",
        "if constexpr (MOMENTUM && NARROW) least |= headroom(element.m, k.m_limit);",
        "tests/test_atomic.py -k 'float32_state and cpu'",
        "what float32 state cannot hold under float64 parameters is kept",
    ),
    (
        "rule-float32-second-moment-under-float64",
        "if constexpr (RMS && (NARROW || !estimates_root<T>)) least |= headroom(element.v, k.v_limit);",
        "if constexpr (RMS && NARROW) least |= headroom(element.v, k.v_limit);",
        "tests/test_atomic.py -k 'float32_state and cpu'",
        "what float32 state cannot hold under float64 parameters is kept",
    ),
    (
        "rule-curvature-at-1e-40",
        "const double smaller = c < two_h ? c : two_h, larger = c < two_h ? two_h : c;",
        "const double smaller = c, larger = two_h;",
        f"{ROUGH} -k 'at_the_edges and cpu'",
        "coordinate steps at a loss of 1e-40",
    ),
    (
        "rule-0-by-0-of-coordinates",
        "k.flatness = static_cast<T>(larger > 0 ? two_h / larger : 0);",
        "k.flatness = static_cast<T>(two_h / larger);",
        "tests/test_atomic.py -k 'lr_and_height_are_0 and cpu'",
        "gamma is 0 where it would be 0/0",
    ),
    (
        "rule-norm-not-looked-at",
        "} else if (!is_finite(sums.weighted + sums.alignment + norm)) {",
        "} else if (!is_finite(sums.weighted + sums.alignment)) {",
        "tests/test_atomic.py -k 'norm_that_overflows and cpu'",
        "a norm that is not finite skips the step",
    ),
    (
        "rule-clip-of-the-sum",
        "rule.rms ? sums.weighted : clip * clip * sums.weighted;",
        "sums.weighted;",
        "tests/test_properties.py -k 'any_problem and cpu and NGNM'",
        "sums of clipped gradients",
    ),
    (
        "rule-clip-epsilon",
        "max_grad_norm / (std::sqrt(norm_squared) + 1e-6)",
        "max_grad_norm / std::sqrt(norm_squared)",
        "tests/test_properties.py -k 'any_problem and cpu and NGNM'",
        "clipping is torch's formula",
    ),
    (
        "rule-0-by-0",
        "const double rho = denominator == 0 ? 1.0 :",
        "const double rho = denominator == 0 ? 0.0 :",
        "tests/test_identities.py -k shrink_at_the_minimum",
        "rho is 1 where it would be 0/0",
    ),
    (
        "rule-overflow-told-as-a-bad-loss",
        "  if (inputs.found_inf != 0) {\n",
        "  if (inputs.found_inf != 0 && is_finite(h)) {\n",
        "tests/test_atomic.py -k 'explains_a_bad_loss and cpu'",
        "the reason that is told is the first that holds",
    ),
    (
        "rule-unit-of-the-curvature",
        "k.curvature = static_cast<T>(larger > 0 ? c / larger * unit : 0);",
        "k.curvature = static_cast<T>(larger > 0 ? c / larger : 0);",
        "tests/test_conformance.py -k 'steps_from_identical_state and cpu and NGNMDv2'",
        "the paper's step sizes of coordinates",
    ),
    (
        "rule-keep-forgets-v",
        "  element.v = headroom < 0 ? old.v : element.v;\n",
        "",
        "tests/test_atomic.py -k 'non_finite_gradient_in_coordinate_rules and cpu and v2'",
        "an element that is kept keeps its second moment",
    ),
    (
        "rule-regularised-lr",
        "return rule.regularised ? c / (1 + group.weight_decay * c) : c;",
        "return c;",
        "tests/test_conformance.py -k 'steps_from_identical_state and cpu and NGNMDv1W'",
        "the paper's regularised decay",
    ),
    (
        "rule-aim",
        "return inputs.aim * (inputs.loss - inputs.loss_floor);",
        "return inputs.loss - inputs.loss_floor;",
        f"{TARGET} -k 'under_a_schedule and cpu'",
        "a target takes its part off the loss",
    ),
    (
        "rule-aim-above-0",
        "return inputs.aim * (inputs.loss - inputs.loss_floor);",
        "return inputs.aim * inputs.loss - inputs.loss_floor;",
        f"{TARGET} -k 'under_a_schedule and cpu'",
        "a target is a part of what is above the floor",
    ),
    (
        "rule-cap",
        "return group.step_cap > 0 ? group.step_cap : group.lr;",
        "return group.lr;",
        f"{TARGET} -k 'under_a_schedule and cpu'",
        "rho is computed at the cap",
    ),
    (
        "rule-schedule-of-the-step",
        "(1 - group.beta1) * (left * gamma) * unit",
        "(1 - group.beta1) * gamma * unit",
        f"{TARGET} -k 'under_a_schedule and cpu'",
        "a schedule scales the gradient part",
    ),
    (
        "rule-schedule-of-decay",
        "group.weight_decay * (left * a)",
        "group.weight_decay * a",
        f"{TARGET} -k 'under_a_schedule and cpu'",
        "a schedule scales the decay",
    ),
    (
        "rule-adamw-decay-enters-m",
        "  m = displacement;\n  if constexpr (DECAY == Decay::apart) displacement = multiply_add(all<V>(k.decay), x, displacement);",
        "  if constexpr (DECAY == Decay::apart) displacement = multiply_add(all<V>(k.decay), x, displacement);\n  m = displacement;",
        "tests/test_decay_form.py -k 'test_steps and cpu'",
        "AdamW's decay stays out of the momentum",
    ),
)

CONVERT_H = of(
    "convert.h",
    (
        "convert-limit-of-bfloat16",
        "case DType::bfloat16: return static_cast<T>(BFLOAT16_LIMIT);",
        "case DType::bfloat16: return infinity;",
        "tests/test_atomic.py -k 'storage_overflow and cpu'",
        "what bfloat16 parameters cannot hold is kept",
    ),
    (
        "convert-limit-of-float32-under-float64",
        "return sizeof(T) > 4 ? static_cast<T>(FLOAT32_LIMIT) : infinity;",
        "return infinity;",
        "tests/test_atomic.py -k 'float32_state and cpu'",
        "what float32 state cannot hold under float64 parameters is kept",
    ),
    (
        "convert-limit-of-rounding-at-random",
        "    case DType::bfloat16: return static_cast<T>(STOCHASTIC_BFLOAT16_LIMIT);",
        "    case DType::bfloat16: return overflow_limit<T>(type);",
        "tests/test_rounding.py tests/test_narrow.py -k 'no_parameter_overflows or cannot_hold'",
        "rounding at random never reaches infinity",
    ),
)

CHECKS = of(
    "checks.py",
    (
        "checks-complex-and-real",
        "    if grad.is_complex() != param.is_complex():\n",
        "    if param.is_complex() and not grad.is_complex():\n",
        "tests/test_bad_input.py -k 'is_complex_where and cpu'",
        "a real parameter with a complex gradient is refused",
    ),
)

BINDINGS = of(
    "bindings.cpp",
    (
        "bindings-unknown-types",
        'check(type >= 0 && type < ngn::DTYPE_COUNT, "no such element type");',
        "",
        "tests/test_cpu_engine.py -k bindings_check",
        "no kernel runs on an element type that nobody named",
    ),
)

CPU = (
    of(
        "engine.cpp",
        (
            "cpu-step-of-absent-parameters",
            "      if (row.g) *row.step += 1;\n",
            "      *row.step += 1;\n",
            "tests/test_conformance.py -k 'without_gradient_stands_still and cpu and NGNM'",
            "a parameter without gradient stands still, its count too",
        ),
        (
            "cpu-last-reason-of-the-first-bucket",
            "if (code > counts.reason) counts.reason = code;",
            "counts.reason = code;",
            f"{BUCKETS} -k 'skips and cpu'",
            "a reason of any bucket is told",
        ),
        (
            "cpu-skips-counted-per-bucket",
            "if (last && counts.reason != 0) {",
            "if (counts.reason != 0) {",
            f"{BUCKETS} -k 'skips and cpu'",
            "a skipped step is counted once",
        ),
        (
            "cpu-norm-overwritten",
            "  if (!rule.rms) sums.norm = total.norm;\n",
            "  sums.norm = total.norm;\n",
            "tests/test_properties.py -k 'any_problem and cpu and NGNMDv1'",
            "the norm of the first reduce serves the second",
        ),
        (
            "cpu-copies-not-divided",
            "const double sum = k.unit * sum_lanes(weighted) / replicas;",
            "const double sum = k.unit * sum_lanes(weighted);",
            "tests/ranks/test_layouts.py -k 'ddp-2 and NGNM and not NGNMD'",
            "elements that lie on several ranks are counted once",
        ),
        (
            "cpu-sums-of-one-bucket",
            "return sum_all(bucket.totals, bucket.bucket_count);",
            "return sum_all(bucket.totals + bucket.index, 1);",
            "tests/test_conformance.py -k 'dtypes_side_by_side and cpu'",
            "buckets share one denominator",
        ),
        (
            "cpu-telemetry-of-the-decayed-lr",
            "bucket.sizes[STEP_SIZES + j] = schedule(group) * effective_step(rule, group) * shrink.rho;",
            "bucket.sizes[STEP_SIZES + j] = bucket.groups[j].lr * shrink.rho;",
            "tests/test_identities.py -k telemetry_is_the_oracles",
            "step_sizes() are the oracle's",
        ),
    )
    + of(
        "chunks.h",
        (
            "cpu-coefficients-of-another-count",
            "if (row.group != group_ || count != count_) {",
            "if (row.group != group_) {",
            "tests/test_cpu_engine.py -k counts_of_neighbours_differ",
            "each parameter has a step count of its own",
        ),
    )
    + of(
        "float_loop.h",
        (
            "cpu-tail-with-the-old-second-moment",
            "    if constexpr (RMS) v[i] = element.v;\n",
            "",
            "tests/test_conformance.py -k 'test_sizes and cpu and NGNMDv'",
            "the tail of a row is updated as the vectors are",
        ),
    )
    + of(
        "quant_loop.h",
        (
            "cpu-float64-state-as-halves",
            "      case DType::float64: return store_float64(value, at<char>(i));\n",
            "      case DType::float64: return encode_float16(value, is_stochastic(), noise, at<char>(i));\n",
            "tests/test_narrow.py -k 'float64_state_beside and cpu and 8bit'",
            "float64 state beside narrow columns stays float64",
        ),
        (
            "cpu-noise-of-a-tail",
            "Noise(row.noise_key, count, row.offset + whole)",
            "Noise(row.noise_key, count, row.offset)",
            "tests/test_rounding.py tests/test_narrow.py -k 'round_to_the_same_bits or every_format'",
            "noise depends on the element's place, in the last block too",
        ),
        (
            "cpu-block-that-keeps-all",
            "any_negative(headroom);\n    keep(old, headroom, element);\n",
            "any_negative(headroom);\n    element = old;\n",
            "tests/test_narrow.py -k cannot_hold",
            "only elements that a format cannot hold are kept",
        ),
        (
            "cpu-block-without-care-of-v",
            " | headroom(sum_of_v, k.v_limit)",
            "",
            "tests/test_narrow.py -k cannot_hold",
            "second moments that narrow state cannot hold are kept",
        ),
        (
            "cpu-block-without-care-of-m",
            "      if constexpr (MOMENTUM) squares = multiply_add(element.m, element.m, squares);\n",
            "",
            "tests/test_narrow.py -k cannot_hold",
            "momentum that narrow state cannot hold is kept",
        ),
        (
            "cpu-block-limit",
            "const double square = 0.99 * limit * limit;",
            "const double square = limit * limit * limit;",
            "tests/test_atomic.py -k 'storage_overflow and cpu'",
            "what 16-bit parameters cannot hold is kept",
        ),
        (
            "cpu-care-taken-for-elements-kept",
            "    kept = kept || any_negative(headroom);\n",
            "    kept = true;\n",
            "tests/test_rounding.py -k no_parameter_overflows",
            "large numbers that can be stored are nothing to warn of",
        ),
        (
            "cpu-tail-of-remainders",
            "    if (rounding_ == Rounding::exact) std::memcpy(remainder(i), copy.remainders,",
            "    if (false) std::memcpy(remainder(i), copy.remainders,",
            "tests/test_rounding.py",
            "the last elements' remainders are stored",
        ),
    )
)

FORMATS_H = of(
    "quant_block.h",
    (
        "formats-h-bits-of-kept-float64",
        "static_cast<float>(wide[i]) == value[i] ? wide[i] : value[i];",
        "value[i];",
        "tests/test_narrow.py -k 'float64_state_that_is_kept and cpu'",
        "elements of float64 state that are kept keep all of their bits",
    ),
    (
        "formats-h-ties-of-the-nearest",
        "== 0 ? bits + 0x7fff : bits + 0x8000;",
        "== 0 ? bits + 0x8000 : bits + 0x8000;",
        "tests/test_cpu_engine.py -k narrowing_rounds_like_torch",
        "ties of bfloat16 go to even",
    ),
    (
        "formats-h-least-exponent-of-m",
        "return raised > 7 ? raised - 6 : 1;",
        "return raised - 6;",
        "tests/test_narrow.py -k same_bits",
        "scales of tiny momentum",
    ),
    (
        "formats-h-lowest-code",
        "highest > 254 ? 1 : 256 - static_cast<int32_t>(highest);",
        "1;",
        "tests/test_narrow.py -k same_bits",
        "codes of the smallest second moments",
    ),
    (
        "formats-h-noise-between-blocks",
        "    if (__builtin_expect(skip != 0, 0)) {\n",
        "    if (false) {\n",
        "tests/test_narrow.py -k same_bits",
        "noise is counted from the whole parameter's start",
    ),
    (
        "formats-h-largest-second-moment",
        "bottom == 0 || top > LARGEST_V",
        "bottom == 0",
        "tests/test_narrow.py -k same_bits",
        "second moments near the largest number",
    ),
    (
        "formats-h-second-moments-of-0",
        "bottom == 0 || top > LARGEST_V",
        "top > LARGEST_V",
        "tests/test_narrow.py -k same_bits",
        "second moments of 0 beside others",
    ),
    (
        "formats-h-second-moments-out-of-reach",
        " && (word >> 5) - (bottom >> shift) <= 254}",
        "}",
        "tests/test_narrow.py -k same_bits",
        "second moments far below the largest of their block",
    ),
)

TEAM = of(
    "threads.cpp",
    (
        "team-rounding-mode-of-threads",
        "  std::fesetenv(&work.environment);\n",
        "",
        f"{ROUGH} -k flushing_is_the_same",
        "threads treat subnormal numbers as the caller does",
    ),
)

KERNELS = of(
    "kernels.py",
    (
        "triton-skips-counted-per-bucket",
        "counted = (last != 0) & (code != NONE)",
        "counted = code != NONE",
        INTERPRETED + f"{BUCKETS} -k 'skips'",
        "a skipped step is counted once",
    ),
    (
        "triton-sums-of-one-bucket",
        "for i_bucket in range(1, n_buckets):",
        "for i_bucket in range(1, 1):",
        INTERPRETED + "tests/test_conformance.py -k 'dtypes_side_by_side and NGNM'",
        "buckets share one denominator",
    ),
    (
        "triton-curvature-at-1e-40",
        "        gamma = tl.minimum(c, two_h)\n        larger = tl.maximum(c, two_h)\n",
        "        gamma = c\n        larger = two_h\n",
        INTERPRETED + f"{ROUGH} -k at_the_edges",
        "coordinate steps at a loss of 1e-40",
    ),
    (
        "triton-aim",
        "return tl.load(inputs + AIM) * (tl.load(inputs + LOSS) - tl.load(inputs + LOSS_FLOOR))",
        "return tl.load(inputs + LOSS) - tl.load(inputs + LOSS_FLOOR)",
        INTERPRETED + f"{TARGET} -k 'under_a_schedule and 0.8 and clipping'",
        "a target takes its part off the loss",
    ),
    (
        "triton-cap-of-the-sums",
        "c = largest_step(tl.load(group + LR), tl.load(group + STEP_CAP))",
        "c = tl.load(group + LR)",
        INTERPRETED + f"{TARGET} -k 'under_a_schedule and 0.8 and clipping'",
        "rho is computed at the cap",
    ),
    (
        "triton-schedule-of-the-step",
        "(1 - beta1) * (left * gamma)",
        "(1 - beta1) * gamma",
        INTERPRETED + f"{TARGET} -k 'under_a_schedule and 0.8 and clipping'",
        "a schedule scales the gradient part",
    ),
    (
        "triton-schedule-of-decay",
        "weight_decay * (left * a)",
        "weight_decay * a",
        INTERPRETED + f"{TARGET} -k 'under_a_schedule and 0.8 and clipping'",
        "a schedule scales the decay",
    ),
    (
        "triton-adamw-decay-enters-m",
        "return b_x - (b_m_new + decay * b_x), b_m_new",
        "return b_x - (b_m_new + decay * b_x), b_m_new + decay * b_x",
        INTERPRETED + "tests/test_decay_form.py -k test_steps",
        "AdamW's decay stays out of the momentum",
    ),
    (
        "triton-schedule-of-step-sizes",
        "schedule(b_lr, b_step_cap) * b_a * rho",
        "b_a * rho",
        INTERPRETED + f"{TARGET} -k telemetry",
        "step sizes are those of the step",
    ),
    (
        "triton-norm-of-a-skipped-step",
        "tl.store(sizes + SQUARED_NORM, norm, mask=reason == NONE)",
        "tl.store(sizes + SQUARED_NORM, norm)",
        INTERPRETED + f"{TARGET} -k keeps_the_norm",
        "a skipped step reports nothing",
    ),
    (
        "triton-0-by-0",
        "rho = tl.where(denominator == 0, 1.0,",
        "rho = tl.where(denominator == 0, 0.0,",
        INTERPRETED + "tests/test_identities.py -k shrink_at_the_minimum",
        "rho is 1 where it would be 0/0",
    ),
    (
        "triton-skipped-steps-count",
        "for i in range(0, tl.where(reason == NONE, n_rows, 0), BLOCK):",
        "for i in range(0, n_rows, BLOCK):",
        INTERPRETED + "tests/test_atomic.py -k 'test_non_finite_loss and NGNM and nan'",
        "a skipped step leaves the step count alone",
    ),
    (
        "triton-copies-not-divided",
        "    weighted /= replicas\n",
        "",
        INTERPRETED + f"{BUCKETS} -k copies",
        "elements that lie on several ranks are counted once",
    ),
    (
        "triton-barrier-of-reduce",
        "        tl.store(ours + NORM * n_chunks, weighted)\n\n    tl.debug_barrier()\n",
        "        tl.store(ours + NORM * n_chunks, weighted)\n\n",
        "tests/test_triton_races.py -k 'no_race_in_any_order and NGNM'",
        "all partial sums are written before the ticket is taken",
        SAME_INSTRUCTIONS,
    ),
    (
        "triton-barrier-of-apply",
        "before the last block advances it.\n    tl.debug_barrier()\n",
        "before the last block advances it.\n",
        "tests/test_triton_races.py -k 'no_race_in_any_order and NGNM'",
        "step counts advance after every thread has read them",
        SAME_INSTRUCTIONS,
    ),
    (
        "triton-ticket-of-reduce-relaxed",
        'if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:\n'
        "        tl.store(ticket, 0)\n        total = sums",
        'if tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu") == n_chunks - 1:\n'
        "        tl.store(ticket, 0)\n        total = sums",
        "tests/test_triton_races.py -k 'no_race_in_any_order and NGNM'",
        "the last block sees all partial sums",
    ),
    (
        "triton-ticket-of-apply-relaxed",
        'if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:\n'
        "        tl.store(ticket, 0)\n        total = sum_buckets",
        'if tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu") == n_chunks - 1:\n'
        "        tl.store(ticket, 0)\n        total = sum_buckets",
        "tests/test_triton_races.py -k 'no_race_in_any_order and NGNM'",
        "the last block advances counts that all others have read",
    ),
)

TRITON_FORMATS = of(
    "columns.py",
    (
        "triton-limit-of-bfloat16",
        "if ROUNDING == STOCHASTIC else BFLOAT16_LIMIT",
        "if ROUNDING == STOCHASTIC else INFINITY",
        INTERPRETED + "tests/test_atomic.py -k 'storage_overflow and bfloat16'",
        "what bfloat16 parameters cannot hold is kept",
    ),
)

TRAINERS = of(
    "feed.py",
    (
        "feed-two-optimizers-on-one-loss",
        "        if backwards & self._stepped:\n",
        "        if False:\n",
        "tests/test_feed.py",
        "two optimizers do not step on one loss",
    ),
    (
        "feed-all-optimizers",
        "if before != after]",
        "]",
        "tests/test_feed.py",
        "each optimizer gets the loss of its own gradients",
    ),
    (
        "feed-old-backwards-are-remembered",
        "                self._pending.pop(optimizer, None)\n",
        "                pass\n",
        "tests/test_feed.py",
        "a loss that was dropped is forgotten",
    ),
    (
        "feed-stale-losses-are-kept",
        "            if not optimizer.loss_is_pending():\n",
        "            if not optimizer._pending:\n",
        "tests/test_feed.py",
        "a loss whose gradients the module cleared is dropped before the next backward()",
    ),
    (
        "feed-losses-of-users-unexpected",
        "self._pending.setdefault(optimizer, set()).add(self._backwards)",
        "self._pending[optimizer].add(self._backwards)",
        "tests/test_feed.py",
        "a loss that the user has added goes together with the feed's",
    ),
    (
        "feed-wrappers-not-opened",
        '        while hasattr(optimizer, "optimizer"):\n',
        '        if hasattr(optimizer, "optimizer"):\n',
        "tests/test_feed.py",
        "an optimizer is found inside any number of wrappers",
    ),
    (
        "feed-gradients-added-in-place",
        "None if grad is None else (id(grad), grad._version)",
        "None if grad is None else id(grad)",
        "tests/test_feed.py",
        "a backward() that adds to a gradient is seen",
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *BINDINGS,
    *NATIVE_SIGNATURE,
    *RULE_H,
    *CONVERT_H,
    *CPU,
    *FORMATS_H,
    *TEAM,
    *RULES,
    *CHECKS,
    *PLAN,
    *SIGNATURE,
    *OPTIMIZER,
    *LOSS,
    *BACKWARD_COUNTER,
    *RANKS,
    *SHARDS,
    *STATE,
    *CHECKPOINT,
    *STEP_SIZE,
    *OPTIONS,
    *ROWS,
    *CPU_PY,
    *FORMATS,
    *TABLES,
    *TRANSFER,
    *REFERENCE,
    *KERNELS,
    *TRITON_FORMATS,
    *TRAINERS,
)
