"""AdamW as `torch.optim.AdamW`, stepped by `om.adamw`: one pass over memory, and a precision that can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ops_math as om
from ops_nn.optim import asked
from ops_nn.optim.gathering import Gatherer, require

NARROW = (torch.bfloat16, torch.float16)
FLOATING = (torch.float32, torch.float64, *NARROW)


class AdamW(torch.optim.AdamW):
    """AdamW (decoupled weight decay), stepped by `om.adamw`.

    Takes what `torch.optim.AdamW` takes, does what it does, and its state dict can be loaded by it and from it. On a GPU a step is one pass
    over memory in two launches; on a CPU it is PyTorch's fused step where that has what was asked for. With `om.enabled(False)` it is
    PyTorch's functional AdamW. It may be captured in a CUDA graph after one step outside; give `lr` as a tensor to change it then.

    Args:
        params: parameters, or groups of them, floating point and dense; those without a gradient are skipped.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the two averages, two numbers.
        eps: added to the root.
        weight_decay: decoupled; a step shrinks a parameter by `lr * weight_decay`.
        amsgrad: keep the largest mean square. PyTorch's own step runs then.
        maximize: ascend.
        foreach, fused, differentiable: None or what fused means; PyTorch's unfused forms are refused in words.
        capturable: for `om.enabled(False)`; otherwise every step can be captured.
        state_dtype: dtype of the two averages, fp32 or bf16; None is that of the parameter. In bf16 `exp_avg_sq` moves by less than its
            rounding at the usual beta2 = 0.999 and stands still: use fp32, or stochastic rounding.
        master_weights: keep an fp32 copy of each bf16 or fp16 parameter and update that; the parameter is its rounding.
        stochastic_rounding: an `om.Rng` by which bf16 parameters and bf16 `exp_avg_sq` are rounded up or down at random, so that the mean
            is kept. Without it or a master copy, a bf16 parameter loses every change below 1/512 of it.

    Precision: arithmetic in fp32 (fp64 for fp64), bias corrections in fp64, one rounding at each store.
    Determinism: level 1.
    Raises: ArgumentError for what is refused, for settings out of their bounds, for what is no list of parameters (a TypeError as well, as
        PyTorch's), for sparse gradients and for tensor subclasses other than DTensor.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """

    _step_supports_amp_scaling = True  # GradScaler then passes its scale and what it found, and waits for nothing

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: om.Rng | None = None,
    ) -> None:
        do = "Use torch.optim.AdamW for that."
        require(not foreach, "foreach", "None or False", repr(foreach), do)
        require(fused is not False, "fused", "None or True", repr(fused), do)
        require(not differentiable, "differentiable", "False", repr(differentiable), do)
        params = asked.listed(params)
        asked.settings({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        wanted = (None, torch.float32, torch.bfloat16)
        require(state_dtype in wanted, "state_dtype", "None, torch.float32 or torch.bfloat16", str(state_dtype), "Pick one of these.")
        is_rng = stochastic_rounding is None or isinstance(stochastic_rounding, om.Rng)
        got = type(stochastic_rounding).__name__
        require(is_rng, "stochastic_rounding", "an ops_math.Rng or None", got, "Make one with ops_math.Rng(seed, device).")
        both = master_weights and stochastic_rounding is not None
        require(not both, "stochastic_rounding", "None with master_weights", "both", "A master copy loses nothing; drop one of them.")
        self.state_dtype, self.master_weights, self.stochastic_rounding = state_dtype, master_weights, stochastic_rounding
        self._keep_nothing()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own where it states them.

        Args:
            param_group: `params`, and any of lr, betas, eps, weight_decay, amsgrad and maximize; other entries are left as they are.

        Raises: ArgumentError for settings out of their bounds (PyTorch looks at those of the whole optimizer alone), for tensors that
            are no leaves or are in another group; it is a TypeError or a KeyError as well where PyTorch raises that.
        """
        asked.group(param_group, self.defaults, {p for group in self.param_groups for p in group["params"]})
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        own = ("state_dtype", "master_weights", "stochastic_rounding")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_tables" not in self.__dict__:  # a copy or an unpickled one; loading a state dict also comes here, and keeps what it has
            self._keep_nothing()

    def _keep_nothing(self) -> None:
        self._tables, self._gatherer = om.AdamWTables(), Gatherer(self._look)

    def __repr__(self) -> str:
        kept = "the parameter's dtype" if self.state_dtype is None else str(self.state_dtype).removeprefix("torch.")
        rounding = "stochastically" if self.stochastic_rounding is not None else "to nearest"
        copies = "fp32 master copies" if self.master_weights else "no master copies"
        runs = "om.adamw" if om.is_enabled() else "torch.optim's functional AdamW, since ops_math is switched off"
        return f"{super().__repr__()}\nAverages in {kept}, {copies}, bf16 rounded {rounding}.\nSteps by {runs}: {self._tables}"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: torch.Tensor | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again; called with gradients enabled.
            clip: what all gradients are multiplied by on the way, a tensor of one element, e.g. `clip_scale(...).coefficient`.

        Returns:
            What the closure returned, or None. Gradients are left as they are, also under a loss scaler.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scales: dict[str, Any] = {"grad_scale": getattr(self, "grad_scale", None), "found_inf": getattr(self, "found_inf", None)}
        scales |= {"clip": clip, "rng": self.stochastic_rounding, "tables": self._tables}
        groups = self._gatherer.groups(self.param_groups, self.state)
        if om.is_enabled() and not torch.compiler.is_compiling():
            om.adamw(groups, **scales)
        else:
            options = {name: self.param_groups[0][name] for name in ("foreach", "fused", "capturable")}
            om.adamw(groups, options=options, **scales)
        return loss

    def resync_masters(self) -> None:
        """Take the fp32 copies anew from the parameters at the next step. Call it after writing into parameters, e.g. loading weights."""
        for state in self.state.values():
            state.pop("master", None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`.

        The averages come in this optimizer's `state_dtype` straight from the file, not by way of the parameter's dtype.

        Raises: ArgumentError where its groups are others than this optimizer's.
        """
        seen: list[dict[str, Any]] = []

        def look(_: Any, final: dict[str, Any]) -> None:
            asked.loadable(final, self.param_groups)
            seen.append(final)

        handle = self.register_load_state_dict_pre_hook(look)  # the last hook: it sees what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        params = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in seen[0]["param_groups"] for name in group["params"]]
        for name, p in zip(names, params, strict=True):
            loaded = seen[0]["state"].get(name, {})
            for key, value in loaded.items():
                if isinstance(value, torch.Tensor):
                    self.state[p][key] = value.to(device=p.device, dtype=self._dtype_of(key, p), copy=True)

    def _dtype_of(self, key: str, p: torch.Tensor) -> torch.dtype:
        """The dtype of one entry of a parameter's state."""
        if key in ("step", "master"):
            return torch.float32
        return p.dtype if self.state_dtype is None or p.dtype == torch.float64 else self.state_dtype

    def _look(self, p: torch.Tensor, group: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
        """The state of a parameter, made when it is new, and whether a master copy is its last entry."""
        names = ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        state = self.state[p]
        if any(name not in state for name in names):
            self._start(p, state, names)
        with_master = self.master_weights and p.dtype in NARROW
        if with_master and "master" not in state:
            state["master"] = p.detach().to(torch.float32, copy=True)
        return [state[name] for name in (*names, "master")[: len(names) + with_master]], with_master

    def _start(self, p: torch.Tensor, state: dict[str, Any], names: list[str]) -> None:
        """The state before the first step."""
        require(p.dtype in FLOATING, "params", "fp32, bf16, fp16 or fp64", str(p.dtype), "Use torch.optim.AdamW for others.")
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=p.device))
        for name in names[1:]:
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=self._dtype_of(name, p), memory_format=torch.preserve_format, requires_grad=False)
