"""Do the tests notice? Each of these mistakes is made in a copy of the code, and the tests must fail there.

    python tests/mutants.py [--only data/tree.py] [--workers 2]

A mistake is a file, the text as it stands, and the text as somebody could have written it. It is killed when
a test of its file fails. It survives when all of them pass: then a law is missing, and the exit code is 1.
Only the laws and examples of this repository run, without the reference values of other implementations.
Without --only the result goes to benchmarks/results/mutants.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minidpo.results.success import circumstances  # noqa: E402

# a file of minidpo/ -> what runs against its mistakes, in tests/
TESTS = {
    "objective/scores.py": [
        "objective/test_scores.py",
        "objective/test_losses.py",
        "objective/test_variants.py",
    ],
    "model/head.py": ["objective/test_scores.py"],
    "model/attention.py": ["model/test_attention.py"],
    "model/guesses.py": ["model/test_sampling.py"],
    "objective/losses.py": ["objective/test_losses.py"],
    "objective/variants.py": ["objective/test_variants.py", "objective/test_loss_laws.py"],
    "objective/policy_gradient.py": ["objective/test_policy_gradient.py"],
    "objective/reward_model.py": ["objective/test_policy_gradient.py"],
    "learning/average.py": ["learning/test_average.py"],
    "learning/grpo.py": [
        "learning/test_grpo.py",
        "learning/test_ppo.py",
        "learning/test_sft_dpo.py",
    ],
    "learning/rollouts.py": [
        "learning/test_grpo.py",
        "learning/test_ppo.py",
        "learning/test_sft_dpo.py",
    ],
    "learning/ppo.py": ["learning/test_ppo.py", "learning/test_sft_dpo.py"],
    "learning/rm.py": ["data/test_shots.py", "learning/test_rm.py", "learning/test_sft_dpo.py"],
    "data/tree.py": ["data/test_tree.py"],
    "data/batch.py": ["data/test_tree.py", "learning/test_grpo.py"],
    "data/prompt.py": ["data/test_shots.py", "data/test_tree.py", "data/test_prompt.py"],
    "data/pairs.py": ["data/test_pairs.py"],
    "data/values.py": ["data/test_values.py"],
    "acting/collect.py": ["acting/test_collect.py"],
    "acting/rollout.py": ["acting/test_rollout.py"],
    "data/trl_files.py": ["data/test_trl_files.py"],
    "learning/reference.py": ["learning/test_reference.py"],
    "learning/trainer.py": ["learning/test_trainer.py"],
    "learning/training_run.py": ["learning/test_selection.py"],
    "data/information.py": ["data/test_information.py"],
    "memory/muon.py": ["memory/test_muon.py"],
    "memory/loading.py": ["memory/test_loading.py"],
    "learning/sft.py": [
        "learning/test_selection.py",
        "test_sources.py",
        "learning/test_sft_dpo.py",
    ],
    "learning/selection.py": [
        "data/test_values.py",
        "learning/test_selection.py",
        "learning/test_ppo.py",
        "test_sources.py",
    ],
    "learning/loss_table.py": ["objective/test_variants.py", "objective/test_loss_laws.py"],
    "learning/preferences.py": ["learning/test_preferences.py"],
    "loop.py": ["test_loop_asks.py"],
    "learning/dpo.py": ["learning/test_sft_dpo.py", "test_sources.py", "data/test_shots.py"],
    "learning/nano_base.py": ["learning/test_nano_base.py"],
    "acting/policies.py": ["acting/test_rollout.py"],
    "model/gguf_file.py": ["model/test_families.py"],
    "results/gguf_out.py": ["results/test_gguf_out.py"],
    "results/evaluate.py": ["results/test_evaluate.py"],
}

MISTAKES = {
    "loop.py": [
        ("compare(greedy[start], greedy[learner])", "compare(greedy[learner], greedy[start])"),
        ('"seed": config.seed, "machine": config.machine}', '"machine": config.machine}'),
        (
            "SFTCommand(**self.shared, lora=config.lora, track=config.track)",
            "SFTCommand(**self.shared, track=config.track)",
        ),
        ("variance |= schedule.outcome_variance(episodes)", "schedule.outcome_variance(episodes)"),
        (", max_new_tokens=config.sampling.max_new_tokens)", ")"),
        ("config.machine, first, best)", "config.machine, best, first)"),
    ],
    "learning/dpo.py": [
        (
            "example_indices(step, min(options.rehearse, n), n, config.seed)",
            "example_indices(0, min(options.rehearse, n), n, config.seed)",
        ),
        (
            "example_indices(step, options.batch, len(data.pairs), config.seed, labels=labels)",
            "example_indices(step, options.batch, len(data.pairs), config.seed)",
        ),
        (
            "example_indices(step, options.batch, len(data.pairs), config.seed, labels=labels)",
            "example_indices(step, options.batch, len(data.pairs), 1, labels=labels)",
        ),
        (
            "make_pairs(episodes, rules, config.seed, golden, failures)",
            "make_pairs(episodes, rules, 1, golden, failures)",
        ),
        ("check_prompts([*episodes, *failures, *golden])", "check_prompts([*episodes, *golden])"),
    ],
    "learning/nano_base.py": [
        ("[0][tree.predict]).argmax(-1)", "[0][tree.predict]).argmin(-1)"),
        ("[e for i, e in enumerate(careful) if i % 25]", "list(careful)"),
    ],
    "acting/policies.py": [
        ("command.sampling, seed=command.seed, pages=pages)", "command.sampling, pages=pages)"),
        ("episode.forgotten + len(episode.turns))", "len(episode.turns))"),
    ],
    "model/gguf_file.py": [
        ('"llama-bpe": _WORDS % "{1,3}"', '"llama-bpe": _WORDS % ""'),
        ("tokenizer.normalizer = normalizers.NFC()", "pass"),
        ('setting("rope.freq_base", 10_000.0)', 'setting("rope.freq_base", 1_000_000.0)'),
        ('setting("attention.head_count_kv", heads)', 'setting("attention.head_count_kv", 1)'),
        ('ignore_merges=split == "llama-bpe"', "ignore_merges=False"),
        ("if kind == 4])", "if kind == 5])"),
    ],
    "results/gguf_out.py": [
        ("writer.add_eos_token_id(chat.end)", "writer.add_eos_token_id(chat.start)"),
        ("writer.add_value_length(config.head_dim)", "writer.add_value_length(config.hidden_size)"),
        ("        return gguf_file.value(path, WEIGHTS)\n", "        return None\n"),
    ],
    "results/evaluate.py": [
        ("        jobs = with_shots(jobs, config.examples, config.shots)\n", "        pass\n")
    ],
    "acting/rollout.py": [
        (
            "durations[task], elapsed) / (1 + task_of_page.count(task)))",
            "durations[task], elapsed))",
        ),
        ("for _ in range(ENV_TRIES - 1):", "for _ in range(ENV_TRIES):"),
        ("(error := await try_episode(job, 0))]", "(error := EnvError())]"),
    ],
    "data/trl_files.py": [
        ("said[:len(prompt)] == prompt or said[0]", "said == prompt or said[0]"),
        (
            'if text.strip() not in ("", *(message.content.strip() for message in prompt)):',
            "if text and not prompt:",
        ),
        ("if not (chosen and rejected):", "if not (chosen or rejected):"),
        ("prompt, said, _ = _preference(row, name)", "prompt, _, said = _preference(row, name)"),
        ("if not _solved(row, name):", "if False:"),
        ('row.get("completion") is not None', '"completion" in row'),
    ],
    "learning/reference.py": [
        ("{base} {model.config}", "{model.config}"),
        ("{fingerprint(lora.adapter_tensors(model))} {shape}", "{shape}"),
    ],
    "learning/training_run.py": [
        (
            "zip(names, generator.permutation(len(names)).tolist())",
            "((labels[i], n) for n, i in enumerate(order))",
        ),
        ("batch = min(options.batch, examples)", "batch = options.batch"),
    ],
    "learning/trainer.py": [
        ("self.tokens += tokens", "self.tokens = tokens"),
        ("if last and not torch.stack", "if not last and not torch.stack"),
        ('group["lr"] = full_rate * rate', 'group["lr"] = full_rates[0][0] * rate'),
    ],
    "model/attention.py": [
        ("sees[:, keys].all(0).cumprod(0)", "sees[:, keys].any(0).cumprod(0)"),
        ("sees[:, keys].all(0).cumprod(0)", "sees[:, keys].all(0)"),
        ("keys = sees.any(0).nonzero()", "keys = sees.all(0).nonzero()"),
        ("if len(keys) == keys[-1] + 1 else keys", "if len(keys) else keys"),
        ("device=like.device).tril()", "device=like.device).triu()"),
        ("like.is_cpu and (mask is not None or", "like.is_cpu and (mask is not None and"),
        ("q = (q * D**-0.5)", "q = (q * D**-1)"),
        ("dv[part.at_keys] += weights.mT @ do", "dv[part.at_keys] = (weights.mT @ do).to(real)"),
        (
            "dk[part.at_keys] += ds.mT @ queries.flatten(2, 3)",
            "dk[part.at_keys] = (ds.mT @ queries.flatten(2, 3)).to(real)",
        ),
        (
            "torch._softmax_backward_data(do @ v[part.at_keys].mT, weights, -1, weights.dtype)",
            "weights * (do @ v[part.at_keys].mT)",
        ),
        ("[..., part.shared:] += part.added[:, None]", "[..., part.shared:] += 0"),
    ],
    "model/guesses.py": [
        ("len(text) if self.others else 0", "len(text)"),
        ("text[end:end + most] or continuation", "() or continuation"),
        ("[text[end - CONTEXT:end]] = text, end", "[text[end - CONTEXT:end]] = text, end - 1"),
        ("(*prompt[1 - CONTEXT:], *ids)", "ids"),
        ("            self.after.clear()\n", "            pass\n"),
    ],
    "objective/scores.py": [
        ("torch.where(weight != 0, weight * logps.double(), 0.0)", "weight * logps.double()"),
        (
            "torch.where(weight != 0, weight * logps.double(), 0.0)",
            "torch.where(weight > 0, weight * logps.double(), 0.0)",
        ),
        (
            "torch.where(weight != 0, weight * logps.double(), 0.0)",
            "weight.to(logps.dtype) * logps",
        ),
        ("index_add(0, segment, terms)", "index_copy(0, segment, terms)"),
        ("    return action_mask.double()\n", "    return torch.ones_like(action_mask).double()\n"),
        ("/ lengths(action_mask, segment, n)[segment]", "/ lengths(action_mask, segment, n).sum()"),
        (
            "/ lengths(action_mask, segment, n)[segment]",
            "/ torch.bincount(segment, minlength=n)[segment]",
        ),
        (
            "torch.bincount(segment[action_mask], minlength=n)",
            "torch.bincount(segment, minlength=n)",
        ),
        ("if not counts.all():", "if not counts.any():"),
        ("phi = [1.0] + [0.0] * (n_turns - 1)", "phi = [1.0] * n_turns"),
        ("phi = [(n_turns - t) / n_turns", "phi = [1.0"),
        ("phi = [(n_turns - t) / n_turns", "phi = [(n_turns - t - 1) / n_turns"),
        ("phi = [gamma**t *", "phi = [gamma**(t + 1) *"),
        ("phi = [gamma**t *", "phi = [gamma**(n_turns - 1 - t) *"),
        ("math.expm1((n_turns - t) * log_gamma)", "math.expm1((n_turns - t - 1) * log_gamma)"),
        ("/ math.expm1(n_turns * log_gamma)", "/ math.expm1(log_gamma)"),
        ("math.expm1((n_turns - t) * log_gamma)", "(math.exp((n_turns - t) * log_gamma) - 1)"),
        ("int(turn[written].max()) + 1", "int(turn[action_mask].max()) + 1"),
        ("weight[written] = phi[turn[written]]", "weight[written] = phi[0]"),
        ("written = action_mask & (segment == trajectory)", "written = segment == trajectory"),
        ("        if not valid:\n", "        if valid is None:\n"),
        ("0 <= value < 0.5", "0 <= value <= 0.5"),
    ],
    "model/head.py": [
        ("- total.log()", "+ total.log()"),
        (".exp_().sum(1)", ".exp_().mean(1)"),
        ("logits.gather(1, column[t])", "logits.gather(1, (column[t] - 1).clamp(min=0))"),
        ("softmax.mul_(-grad / total[t, None])", "softmax.mul_(grad / total[t, None])"),
        ("softmax.mul_(-grad / total[t, None])", "softmax.mul_(-grad)"),
        ("torch.where(inside[t, None], grad, 0.0)", "torch.where(inside[t, None], -grad, 0.0)"),
        ("torch.where(inside[t, None], grad, 0.0)", "grad"),
        ("grad_logits.scatter_add_", "grad_logits.scatter_"),
        ("] += grad_logits.t()", "] = grad_logits.t()"),
        ("grad_hidden[t] += grad_logits", "grad_hidden[t] = grad_logits"),
        ("torch.zeros_like(weight, dtype=total.dtype)", "torch.zeros_like(weight)"),
        ("torch.zeros_like(hidden, dtype=total.dtype)", "torch.zeros_like(hidden)"),
        (
            "                if wants_weight:\n",
            "                if grad_weight is None:\n                    "
            "grad_weight = torch.zeros_like(weight)\n                if True:\n",
        ),
        ("torch.maximum(largest[t], logits.amax(1))", "torch.maximum(largest[t], logits.amin(1))"),
        ("torch.maximum(largest[t], logits.amax(1))", "logits.amax(1)"),
        ("total[t] * (largest[t] - top).exp() + sums", "total[t] + sums"),
        ("logits.sub_(largest[t, None])", "logits"),
        ("(hidden[t] @ tile.t()).to(real)", "hidden[t] @ tile.t()"),
        ("(column >= 0) & (column < rows)", "column < rows"),
        ("(column >= 0) & (column < rows)", "column >= 0"),
        ("column = targets - first\n", "column = targets\n"),
        (
            "ctx.save_for_backward(hidden, targets, largest, total, None if quantised else weight)\n",
            "ctx.save_for_backward(hidden, targets, largest, total, None if quantised else weight)\n"
            "        ctx.kept = hidden @ weight.t()\n",
        ),
    ],
    "objective/losses.py": [
        ("after / before.clamp(min=1e-30)", "before / after.clamp(min=1e-30)"),
        ("after / before.clamp(min=1e-30)", "after - before + 1"),
        ("(after > 0).to(value.dtype))", "torch.ones_like(after))"),
        ("return -policy_logp.sum() / n_tokens", "return policy_logp.sum() / n_tokens"),
        ("return -policy_logp.sum() / n_tokens", "return -policy_logp.mean()"),
        ("return -policy_logp.sum() / n_tokens", "return -policy_logp.sum() / len(policy_logp)"),
        ("-F.logsigmoid(beta * log_ratio_gap", "F.logsigmoid(beta * log_ratio_gap"),
        ("-F.logsigmoid(beta * log_ratio_gap", "-F.logsigmoid(-beta * log_ratio_gap"),
        ("-F.logsigmoid(beta * log_ratio_gap", "-beta * F.logsigmoid(log_ratio_gap"),
        (
            "-F.logsigmoid(beta * log_ratio_gap",
            "-torch.log(torch.sigmoid(beta * log_ratio_gap",
            "ref_chosen, ref_rejected))\n",
            "ref_chosen, ref_rejected)))\n",
        ),
        (
            "return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)",
            "return (policy_chosen - ref_chosen) + (policy_rejected - ref_rejected)",
        ),
        (
            "return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)",
            "return (policy_chosen - ref_rejected) - (policy_rejected - ref_chosen)",
        ),
        (
            "return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)",
            "return policy_chosen - (policy_rejected - ref_rejected)",
        ),
        (
            "return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)",
            "return (policy_chosen - ref_chosen).detach() - (policy_rejected - ref_rejected)",
        ),
        ('"margin": beta * (chosen - rejected)', '"margin": chosen - rejected'),
        ('"margin": beta * (chosen - rejected)', '"margin": beta * (rejected - chosen)'),
        ("(chosen > rejected).to", "(chosen >= rejected).to"),
        ('"mean_drop": -(chosen + rejected) / 2', '"mean_drop": (chosen + rejected) / 2'),
        ('"mean_drop": -(chosen + rejected) / 2', '"mean_drop": -(chosen + rejected)'),
        ("@torch.no_grad()\n", ""),
        ("not score.isfinite().all()", "score.isnan().any()"),
        ("assert score.ndim == 1 and len(set(shapes.values())) == 1", "assert True"),
    ],
    "objective/variants.py": [
        ("+ label_smoothing * logit", "- label_smoothing * logit"),
        ("+ label_smoothing * logit", "+ 2 * label_smoothing * logit"),
        (
            "- label_smoothing / (1 - 2 * label_smoothing) * logit",
            "+ label_smoothing / (1 - 2 * label_smoothing) * logit",
        ),
        ("- label_smoothing / (1 - 2 * label_smoothing) * logit", "- label_smoothing * logit"),
        ("- 1 / (2 * beta)) ** 2", "- 1 / beta) ** 2"),
        ("- 1 / (2 * beta)) ** 2", "- 1 / (2 * beta)).abs()"),
        ("- 1 / (2 * beta)) ** 2", "- 1 / (2 * beta)).clamp(max=0) ** 2"),
        ("F.relu(1 - beta * log_ratio_gap", "F.relu(beta - log_ratio_gap"),
        ("F.relu(1 - beta * log_ratio_gap", "F.softplus(1 - beta * log_ratio_gap"),
        ("- policy_rejected) - target_margin", "- policy_rejected) + target_margin"),
        (
            "beta * (policy_chosen - policy_rejected) - target_margin",
            "beta * (policy_chosen - policy_rejected - target_margin)",
        ),
        ("return -policy_chosen - odds_weight *", "return policy_chosen - odds_weight *"),
        ("return -policy_chosen - odds_weight *", "return -policy_chosen + odds_weight *"),
        ("log_odds(policy_chosen) - log_odds(policy_rejected)", "policy_chosen - policy_rejected"),
        ("torch.log(-torch.expm1(mean_logp))", "torch.log1p(-torch.exp(mean_logp))"),
        ("mean_logp = mean_logp.clamp(max=-1e-12)\n", "pass\n"),
        ("baseline - (policy_chosen - ref_chosen)", "(policy_chosen - ref_chosen) - baseline"),
        (
            "(policy_rejected - ref_rejected) - baseline",
            "(policy_rejected - ref_rejected) + baseline",
        ),
        ("undesirable = undesirable_weight *", "undesirable = desirable_weight *"),
        ("baseline = baseline.detach()", "pass"),
        ("return (desirable + undesirable) / 2", "return desirable + undesirable"),
        ("(policy - ref).mean().clamp(min=0).detach()", "(policy - ref).mean().clamp(min=0)"),
        ("(policy - ref).mean().clamp(min=0).detach()", "(policy - ref).mean().detach()"),
        (
            "(policy - ref).mean().clamp(min=0).detach()",
            "(policy - ref).sum().clamp(min=0).detach()",
        ),
        (
            "(policy - ref).mean().clamp(min=0).detach()",
            "(policy - ref).clamp(min=0).mean().detach()",
        ),
        ("(ref_chosen - policy_chosen).clamp(min=0)", "(policy_chosen - ref_chosen).clamp(min=0)"),
        ("(ref_chosen - policy_chosen).clamp(min=0)", "F.relu(ref_chosen - policy_chosen)"),
        ("beta * (h - penalty_weight * (ref_chosen", "(beta * h - penalty_weight * (ref_chosen"),
        ("return -alpha * policy_chosen_mean", "return alpha * policy_chosen_mean"),
    ],
    "learning/average.py": [
        ("weight / total * tensor.double()", "weight * tensor.double()"),
        ("weight / total * tensor.double()", "tensor.double() / len(tensors)"),
        ("weight / total * tensor.double()", "weight / total * tensor"),
        (
            "[tensor.dtype for tensor in tensors], torch.float32)",
            "[tensor.dtype for tensor in tensors])",
        ),
        ("tensor.dtype not in FLOATS or not tensor.isfinite().all()", "tensor.dtype not in FLOATS"),
        ('for name in first if "lora_A" in name', "for name in first"),
        ("SAME_START = 0.1", "SAME_START = 0.9"),
        ("    run.finish()\n", ""),
        ("read_json(folders[0] / lora.CONFIG)", "read_json(folders[-1] / lora.CONFIG)"),
        (
            "(cosine := cosine_of_a(adapters[0], tensors)) < SAME_START",
            "(cosine := cosine_of_a(adapters[0], tensors)) < -1",
        ),
    ],
    "objective/policy_gradient.py": [
        ("above = reward - group_means(reward, group)[group]", "above = reward - reward.mean()"),
        ("above = reward - group_means(reward, group)[group]", "above = reward"),
        ("return torch.where(spread == 0, 0.0, above)", "return above"),
        ("count / (count - 1)\n        above", "1\n        above"),
        ("above / variance.sqrt()[group]", "above / variance[group]"),
        (
            "return group_advantages(reward, group, scale=False) * (count / (count - 1)",
            "return group_advantages(reward, group, scale=False) * (count / count",
        ),
        ("return episode_advantage[episode] + weight *", "return episode_advantage[episode] + "),
        ("group_advantages(step_return, state, scale=False)", "step_return"),
        (
            "group_advantages(step_return, state, scale=False)",
            "group_advantages(step_return, episode, False)",
        ),
        ("value[1:], value.new_zeros(1)", "value[1:], value[-1:]"),
        ("delta[t] + gamma * lam * following", "delta[t] + lam * following"),
        ("delta[t] + gamma * lam * following", "delta[t] + gamma * following"),
        ("-torch.minimum(ratio * advantage", "-torch.maximum(ratio * advantage"),
        ("ratio.clamp(1 - low, 1 + high) * advantage)", "ratio * advantage)"),
        ("ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)"),
        ("return -torch.minimum(ratio * advantage, ", "return -("),
        ("ratio = (logp - old_logp).exp()", "ratio = (old_logp - logp).exp()"),
        ("ratio = (logp - old_logp).exp()", "ratio = 1 + (logp - old_logp)"),
        ("    return logp - ref_logp\n", "    return (logp - ref_logp).abs()\n"),
        ("d = -kl_k1(logp, ref_logp)", "d = kl_k1(logp, ref_logp)"),
        ("return -(logp - old_logp).exp() * logp", "return -logp"),
        ("torch.maximum((value - returns)**2", "torch.minimum((value - returns)**2"),
        ("(value - old_value).clamp(-clip, clip)", "(value - old_value)"),
        ("min(max(kl / target - 1, -0.2), 0.2)", "min(max(1 - kl / target, -0.2), 0.2)"),
        ("min(max(kl / target - 1, -0.2), 0.2)", "(kl / target - 1)"),
        ("coefficient * (1 + 0.1 *", "coefficient * (1 +"),
    ],
    "objective/reward_model.py": [
        ("chosen - rejected - margin", "rejected - chosen - margin"),
        ("chosen - rejected - margin", "chosen - rejected + margin"),
        ("chosen - rejected - margin", "chosen - margin"),
        ("return (reward - value)**2", "return (reward - value).abs()"),
        ("(gap > 0).to(gap.dtype) + (gap == 0) / 2", "(gap >= 0).to(gap.dtype)"),
        ("torch.sigmoid(gap.abs())", "torch.sigmoid(2 * gap.abs())"),
        ("(right - confidence).abs().sum()", "(right - confidence).sum().abs()"),
        ("abs().sum() / pairs.sum()", "abs().sum() / len(pairs)"),
        ("((2 * confidence - 1) * bins)", "(confidence * bins)"),
    ],
    "memory/loading.py": [
        ("load(source, torch.bfloat16, device).to(dtype)", "load(source, dtype, device)"),
        ("        model.read_in = torch.bfloat16\n", ""),
        ("slow = found != machine and is_slow", "slow = is_slow"),
        ('replace(found, dtype="rounded") if slow', 'replace(found, dtype="float32") if slow'),
        (
            'replace(machine, dtype="bfloat16", act_dtype=machine.act_dtype or "float32")',
            'replace(machine, dtype="bfloat16", act_dtype="float32")',
        ),
    ],
    "memory/muon.py": [
        ("return x.mT if tall else x", "return x"),
        ("gram @ gram - 4.7750 * gram)", "gram @ gram + 4.7750 * gram)"),
        ("3.4445 * x + (", "1.5 * x + ("),
        ("x = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)", "x = matrix"),
        ("matrix.norm(dim=(-2, -1), keepdim=True)", "matrix.norm()"),
        ("lerp_(p.grad, 0.05)", "lerp_(p.grad, 0.95)"),
        ("p.grad.lerp(momentum, 0.95)", "momentum.clone()"),
        ("max(ahead[0].shape)", "min(ahead[0].shape)"),
        ("(1 - lr * weight_decay)", "(1 - weight_decay)"),
    ],
    "learning/rm.py": [
        ("len(labels), config.seed, labels", "len(labels), 1, labels"),
        ("    check_prompts([e for e in played if not by_expert(e)])\n", ""),
        ("most = max(", "most = min("),
        ("shares.append((sum(best) / len(best)", "shares.append((float(any(best))"),
        ("sum(solved) / len(solved), any(solved)))", "any(solved), any(solved)))"),
        ("by_instance(attempts).values()", "[attempts]"),
        ("s.instance: s.first_prompt", "s.instance: s.instance"),
        ("set(order[:number])", "set(order[number:])"),
    ],
    "learning/ppo.py": [
        ("len(episodes), config.seed, labels", "len(episodes), 1, labels"),
        ("loss + options.value_weight *", "loss + 0.1 *"),
        (
            "gae(reward, value, options.gamma, options.lam)",
            "gae(reward, value, options.lam, options.gamma)",
        ),
        ("[advantage + value for advantage", "[advantage for advantage"),
        ("starts = [turn.diff(prepend=turn.new_tensor([-1])) != 0", "starts = [turn >= 0"),
        ("torch.zeros(len(together), dtype=torch.long)", "torch.arange(len(together)) % 2"),
        ("losses = batch.start * value_loss", "losses = value_loss"),
        ("explained = batch.start * (", "explained = ("),
        ("paid[-1] = options.outcome_weight", "paid[0] = options.outcome_weight"),
        ("options.gamma * value[1:] - value[:-1]", "value[1:] - options.gamma * value[:-1]"),
        ("options.gamma * value[1:] - value[:-1]", "options.gamma * value[1:]"),
        ("weight = options.kl\n", "weight = options.kl_target or options.kl\n"),
        ("targets_of(number), (old", "targets_of(0), (old"),
        ("logps, weigh_kl=True)", "logps)"),
    ],
    "learning/grpo.py": [
        ("len(data.dialogues), config.seed, labels", "len(data.dialogues), 1, labels"),
        ("if len({e.solved for e in group}) > 1", "if len(group) > 1"),
        (
            "data.by_token(turn_advantages(episodes, options))",
            "data.by_token([-a for a in turn_advantages(episodes, options)])",
        ),
        ('reward, group, scale=options.advantage == "grpo")', "reward, group)"),
        ("(e.instance, turn.observation)", "turn.observation"),
        ("(e.instance, turn.observation)", "e.instance"),
        ("torch.arange(len(e.turns) - 1.0, -1, -1)", "torch.arange(1.0 * len(e.turns))"),
        ("float(e.solved) * options.gamma **", "options.gamma **"),
        ("losses.sum() / batch.step_tokens", "losses.mean()"),
        ("losses + options.kl * (", "losses - options.kl * ("),
        ("losses + options.kl * (ratio * kl if weigh_kl else kl)", "losses"),
        ("ratio * kl if weigh_kl else kl", "ratio * kl"),
        ("ratio * kl if weigh_kl else kl", "ratio.detach() * kl"),
        ("(pushed_up & (ratio > 1 + options.high))", "(ratio > 1 + options.high)"),
    ],
    "learning/rollouts.py": [
        ("    check_player(episodes, old, config.adapter)\n", ""),
        ("if e.forced or by_expert(e)", "if by_expert(e)"),
        ("numbers[torch.tensor(d.written)]", "numbers[torch.tensor(d.written) * 0]"),
        ("written = sum(len(data.dialogues[d].written) for d in picked)", "written = len(picked)"),
        ("    picked = list(dict.fromkeys(picked))\n", ""),
        ("return old, ref or old", "return old, old"),
        ("old = logps_of(config.adapter,", "old = logps_of(config.reference or config.adapter,"),
        ("trees, machine.walk_above)[trees.column]", "trees, machine.walk_above)[trees.row]"),
    ],
    "data/tree.py": [
        ("key=lambda i: trajectories[i]):", "key=lambda i: len(trajectories[i])):"),
        ("for token in path[shared:]:", "for token in path[shared + 1:]:"),
        ("[end or len(ids) for end in ends]", "ends"),
        (
            "depths += range(shared, len(trajectory))",
            "depths += range(shared + 1, len(trajectory) + 1)",
        ),
        ("depths += range(shared, len(trajectory))", "depths += range(len(trajectory) - shared)"),
        (
            "(key <= query) & (query < ends[:, None, :])",
            "(key < query) & (query < ends[:, None, :])",
        ),
        (
            "(key <= query) & (query < ends[:, None, :])",
            "(key <= query) & (query <= ends[:, None, :])",
        ),
        ("(key <= query) & (query < ends[:, None, :])", "(query < ends[:, None, :])"),
        ("(key <= query) & (query < ends[:, None, :])", "(key <= query)"),
        (
            "(key <= query) & (query < ends[:, None, :])",
            "(key <= query) & (query < ends[:, :, None])",
        ),
        ("if not parts or size > budget:", "if not parts or size >= budget:"),
        (
            "            rows = []\n            size = _insert(rows, new)\n",
            "            rows = []\n            size = 0\n",
        ),
        ("            rows = []\n", ""),
        (
            "        parts[-1].append(number)\n",
            "        if len(parts[-1]) < 2:\n            parts[-1].append(number)\n",
        ),
        ("rows[max(0, at - 1):at + 1]", "rows[max(0, at - 1):at]"),
    ],
    "data/batch.py": [
        ("(positions, tree.depths)", "(positions, list(range(len(tree.ids))))"),
        ("ends if branched else None", "None"),
        ("ends if branched else None", "ends"),
        ("predict.append(start + path[t - 1])", "predict.append(start + path[t])"),
        ("predict.append(start + path[t - 1])", "predict.append(start + path[t] - 1)"),
        ("predict.append(start + path[t - 1])", "predict.append(path[t - 1])"),
        ("targets.append(dialogue.ids[t])", "targets.append(dialogue.ids[t - 1])"),
        ("            if turn >= 0:\n", "            if turn > 0:\n"),
        ("            if turn >= 0:\n", "            if turn >= 0 or t == 1:\n"),
        ("if place not in columns:", "if True:"),
        ("column.append(columns[place])", "column.append(len(columns) - 1)"),
        ("row.append(n)", "row.append(0)"),
        ("turns.append(turn)", "turns.append(0)"),
        ("enumerate(means, n)", "enumerate(means)"),
        (
            "torch.full_like(row[its_entries], extra), mean[its_entries]",
            "torch.full_like(row[its_entries], extra), weight[its_entries]",
        ),
        ("its_entries = row == trajectory", "its_entries = row != trajectory"),
        ('"mean": mean_weights,', '"mean": sum_weights,'),
        ("(len(batches[-1]) + 1) * row_length", "len(batches[-1]) * row_length"),
        ("key=lambda i: (lengths[i], i)", "key=lambda i: (-lengths[i], i)"),
        ("tokens=sum(len(tree.ids) for tree in trees)", "tokens=ids.numel()"),
    ],
    "data/prompt.py": [
        ("dialogue.turns[limit:]", "dialogue.turns[limit + 1:]"),
        ("len(dialogue.ids) > limit", "len(dialogue.ids) >= limit"),
        ("any(turn >= 0 for turn in dialogue.turns)", "any(turn > 0 for turn in dialogue.turns)"),
        ("1 + len(trajectory.shots)", "1"),
        ("1 + len(trajectory.shots)", "1 + 2 * len(trajectory.shots)"),
        ("(instruction, turns, shots), shown]", "(instruction, turns), shown]"),
        ("len(new) < FOLD_FROM_LINES", "len(new) <= FOLD_FROM_LINES"),
        ("2 * same >= max(len(old), len(new))", "2 * same >= len(new)"),
        ("if j - i != end - start:", "if i == j:"),
        ("zip((None, *turns), turns)", "zip((None, *turns[:1] * 9), turns)"),
    ],
    "data/pairs.py": [
        ("if instance not in paired]", "if instance in paired]"),
        ("(p.source, e.policy,", "(e.policy,"),
        ("good or next(good_again), bad or next(bad_again)", "good or solved[0], bad or failed[0]"),
        ("in group if len(e.turns) > e.forced)", "in group if len(e.turns) >= e.forced)"),
        ("e.forced == start < len(e.turns)", "e.forced == start"),
        ("for e in good} - {None}", "for e in good}"),
        ("here if e.solved} - {None}", "here if e.solved}"),
        ("if e.solved and e.turns and not e.forced]", "if e.turns and not e.forced]"),
        ("a.reward - b.reward > margin", "a.reward - b.reward >= margin"),
        ("a.reward - b.reward > margin", "abs(a.reward - b.reward) > margin"),
        ("a.reward - b.reward > margin", "a.reward > (1 + margin) * b.reward"),
        ('a.outcome in ("solved", "failed") and a.reward', "a.reward"),
        ("(*product(golden, played), *product(played, golden))", "product(golden, played)"),
        ("if len(a.turns) < len(b.turns)]", "if len(a.turns) <= len(b.turns)]"),
        ("part * turns // parts for part", "part * (turns // parts) for part"),
        ("if not e.solved and e.acted[:end] not in right]", "if not e.solved]"),
        ("e.acted[:end] not in right]", "e.said[:end] not in right]"),
        ("shown.up_to(end), e.up_to(end)", "shown.up_to(end), e"),
        ("rules.clean if noisy(e) else rules.noisy", "rules.noisy if noisy(e) else rules.clean"),
        (" and id(pair.chosen) not in never_chosen]", "]"),
        ("if not e.solved and e.turns and not (rules", "if e.turns and not (rules"),
        ("before - after <= (margin or 0.0)", "before - after < (margin or 0.0)"),
        ("before - after <= (margin or 0.0)", "after - before <= (margin or 0.0)"),
        ("t < failed.forced or None in", "None in"),
        ("e.solved and e.forced == t and e.said", "e.solved and e.said"),
        ("turns=failed.turns[:onward.forced] + onward.turns[onward.forced:]", "turns=onward.turns"),
        ("len(e.turns) > t and e.turns[t].action != failed.turns[t].action]", "len(e.turns) > t]"),
    ],
    "acting/collect.py": [
        (", golden_steps=command.golden_steps)", ")"),
        ("after = 1 + max(", "after = max("),
        (
            "for said in begun or states(group) for _ in range(count)]",
            "for said in begun or states(group)]",
        ),
        ("if said] if whole > 1 else []", "if said]"),
        ("after + n, STEP_LIMIT", "n, STEP_LIMIT"),
    ],
    "data/values.py": [
        ("e.instance == episode.instance and", ""),
        (" and e.forced == t\n", "\n"),
        ("and e.forced == t\n", "and e.forced >= t\n"),
        ("e.said[:t] == episode.said[:t]]", "len(e.turns) >= t]"),
        ("sum(verdicts) / len(verdicts) if", "float(any(verdicts)) if"),
        ("[*values, float(episode.solved)]", "[*values, 0.0]"),
        ("range(e.forced, len(e.turns))", "range(len(e.turns))"),
        ("range(e.forced, len(e.turns))", "range(e.forced, len(e.turns) + 1)"),
    ],
    "data/information.py": [
        ("n * (n - 1) / (c.total() * (c.total() - 1))", "(n / c.total())**2"),
        ("sum(s)**2 - sum(x * x for x in s) for", "sum(s)**2 for"),
        ("/ (m * (m - 1))  # two", "/ m**2  # two"),
        ("agree / m + max(0.0, across) * (1 - 1 / m)", "max(0.0, across)"),
        ("e.turns and not e.forced)", "e.turns)"),
        ("e.first_prompt", "e.instance"),
        ("in by_prompt.values() if len(group) > 1]", "in by_prompt.values()]"),
    ],
    "learning/selection.py": [
        ('"temperature", "temperatures", "top_p"', '"top_p"'),
        (
            "for e in whole if None not in (values := step_values(e, groups[e.instance]))]",
            "for e in whole if (values := step_values(e, groups[e.instance]))]",
        ),
        ("e.reward >= threshold\n", "e.reward > threshold\n"),
        ("e.reward >= threshold\n", "e.reward <= threshold\n"),
        ("(by_expert(e) or uniform(e, seed) < ratio)", "uniform(e, seed) < ratio"),
        ('f"{seed} {player} {episode.key}"', 'f"{seed} {episode.policy} {episode.key}"'),
        ('f"{seed} {player} {episode.key}"', 'f"{player} {episode.key}"'),
        ("(-e.reward, uniform(e, seed))", "(e.reward, uniform(e, seed))"),
        ("ratio * len(group)", "ratio * len(episodes)"),
        ("highest[e.instance]) / temperature)", "1.0) / temperature)"),
        ("highest[e.instance]) / temperature)", "highest[e.instance]) * temperature)"),
        ("(-e.reward, place, uniform(e, seed), e)", "(-e.reward, 0, uniform(e, seed), e)"),
        ("(-e.reward, place, uniform(e, seed), e)", "(0, place, uniform(e, seed), e)"),
        ("for e in episodes if not by_expert(e)])", "for e in episodes])"),
        ("if e.turns and not by_expert(e)]", "if e.turns]"),
        ("whole = [e for e in by_agent if not e.forced]", "whole = by_agent"),
        ("groups = by_instance(by_agent)", "groups = by_instance(whole)"),
        ("< min(2, max(len(e.turns) for e in whole))", "< 0"),
    ],
    "learning/sft.py": [
        ("torch.Generator().manual_seed(config.seed)", "torch.Generator().manual_seed(0)"),
        ("imitated(played, options, config.seed)", "imitated(played, options)"),
        ("(reward, group, options.temperature)", "(reward, group, 0.5)"),
        ("e.up_to(e.forced + 1) if e.relabelled", "e if e.relabelled"),
        ("(e.solved and len(e.turns) > e.forced)", "(len(e.turns) > e.forced)"),
        ("(e.solved and len(e.turns) > e.forced)", "e.solved"),
        ("key=lambda e: (by_expert(e), e.reward)", "key=by_expert"),
        ("key=lambda e: (by_expert(e), e.reward)", "key=lambda e: e.reward"),
        ("sorted(episodes[::-1], key", "sorted(episodes, key"),
        ("return chosen, [e.reward for e in chosen]", "return chosen, [1.0 for e in chosen]"),
        (
            "value_weights(torch.tensor(values))).any()]",
            "value_weights(torch.tensor(values))) is not None]",
        ),
        ("trees.weight * torch.cat(entries)", "torch.cat(entries)[:1] * trees.weight"),
    ],
    "learning/loss_table.py": [
        ("target_margin=0.5), needs_reference=False", "target_margin=0.5), needs_reference=True"),
        ('"ipo_mean": Loss(ipo_loss, "mean"', '"ipo_mean": Loss(ipo_loss, "sum"'),
    ],
    "learning/preferences.py": [
        ("return losses.sum() / batch.step_pairs, shares", "return losses.mean(), shares"),
        ("values.sum() / batch.step_pairs for", "values.mean() for"),
        ("return max(largest, machine.tree_tokens) if split else largest", "return largest"),
        (
            "ref[dialogues][chosen],",
            "ref[dialogues][rejected],",
            "ref[dialogues][rejected], torch",
            "ref[dialogues][chosen], torch",
        ),
        (
            "four = (scores[batch.chosen], scores[batch.rejected]",
            "four = (scores[batch.rejected], scores[batch.chosen]",
        ),
        ("scores[-len(losses):]", "scores[:len(losses)]"),
        ("enumerate(group.trajectories, len(dialogues))", "enumerate(group.trajectories)"),
        ("key = (side.instance, tuple", "key = (tuple"),
        ("        if numbers[c] == numbers[c + 1] and", "        if False and"),
        ("prompts[n - 1]", "prompts[n]"),
        ("tuple(d.ids[:t])", "tuple(d.ids[:t + 1])"),
        (
            "return kto_baseline(score_all(model, of_step,",
            "return -kto_baseline(score_all(model, of_step,",
        ),
        ("for p in picked for d in data.pairs[p]", "for p in picked[:1] for d in data.pairs[p]"),
        ("for p in picked for d in data.pairs[p]", "for p in picked for d in data.pairs[p][:1]"),
    ],
}


def missing() -> list[str]:
    """The texts to be replaced that their file does not hold: empty, or this file must follow the code."""
    absent = []
    for name, mistakes in MISTAKES.items():
        path = ROOT / "minidpo" / name
        text = path.read_text() if path.is_file() else ""
        absent += [
            f"{name} does not hold {old!r}"
            for changes in mistakes
            for old in changes[::2]
            if old not in text
        ]
    return absent


def mutated(name: str, changes: tuple[str, ...]) -> str:
    """The module's text with the mistake: `changes` is the old text and the new one, at its first place.

    With a second pair of old and new text both are replaced at their last place.
    """
    text = (ROOT / "minidpo" / name).read_text()
    for old, new in zip(changes[::2], changes[1::2]):
        head, _, tail = text.rpartition(old) if len(changes) > 2 else text.partition(old)
        text = head + new + tail
    return text


def killer(name: str, changes: tuple[str, ...]) -> str:
    """The first test that fails with the mistake made, "" if all pass; no `changes` are no mistake."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        copy = Path(folder)
        for part in ("minidpo", "envs", "tests", "docs"):
            shutil.copytree(
                ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "nano")
            )
        (copy / "minidpo" / "nano").symlink_to(ROOT / "minidpo" / "nano")
        shutil.copy(ROOT / "pytest.ini", copy)
        (copy / "minidpo" / name).write_text(mutated(name, changes))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--no-header",
                "--tb=no",
                "-p",
                "no:cacheprovider",
                *(f"tests/{test}" for test in TESTS[name]),
            ],
            cwd=copy,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MINIDPO_ORACLES": "/none"},
            timeout=600,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode in (0, 1, 2), (
        f"{name}: pytest ended with {done.returncode}\n{done.stderr}"
    )
    return (failed or ["" if done.returncode == 0 else "it does not import"])[0].split(" - ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=MISTAKES, help="mistakes of this file alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if absent := missing():
        parser.error("update tests/mutants.py:\n" + "\n".join(absent))
    names = [args.only] if args.only else [*MISTAKES]
    with ThreadPoolExecutor(args.workers) as pool:
        for name, test in zip(names, pool.map(lambda name: killer(name, ()), names)):
            if test:  # else every mistake would look killed
                parser.error(f"{name}: {test} fails before any mistake is made")
    jobs = [
        (name, changes)
        for name, several in MISTAKES.items()
        for changes in several
        if args.only in (None, name)
    ]
    alive, killed = [], {}
    with ThreadPoolExecutor(args.workers) as pool:
        for (name, changes), test in zip(jobs, pool.map(lambda job: killer(*job), jobs)):
            old, new = (" ".join(text.split()) for text in changes[:2])
            verdict = "killed  " if test else "SURVIVED"
            print(f"{verdict} {name}: {old}  ->  {new}\n         {test}", flush=True)
            if test:
                killed[name] = killed.get(name, 0) + 1
            else:
                alive.append(f"{name}: {old} -> {new}")
    print(f"{len(jobs) - len(alive)} of {len(jobs)} mistakes killed")
    if args.only is None:
        figures = {
            "mistakes": len(jobs),
            "killed": len(jobs) - len(alive),
            **{f"killed_{Path(name).stem}": count for name, count in killed.items()},
        }
        result = {
            "figures": figures,
            "survived": alive,
            **circumstances("torch", "hypothesis", "pytest"),
            "command": "python tests/mutants.py",
        }
        out = ROOT / "benchmarks" / "results" / "mutants.json"
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return len(alive) > 0


if __name__ == "__main__":
    sys.exit(main())
