// All kinds of steps, each with its number.

#pragma once

#include "expert_steps.h"
#include "look_up_steps.h"
#include "low_rank_steps.h"
#include "mixing_steps.h"
#include "program.h"
#include "row_steps.h"

namespace orcinus {

template <class... What>
struct Kinds {};

// In the order of their numbers, as in `kernels.steps.STEPS`.
using Steps = Kinds<Embed, EmbedPacked, AddPositions, LookUpAngles, Select, CopyPart, RMSNorm,
                    RMSNormPart, LayerNorm, Multiply, Activate, ApplyGate, RotaryWriteKV, WriteKV,
                    Attend, TurnHeads, MultiplyHeads, WriteLatents, RunDeltaNet, Add, Scale,
                    ScaleByPosition, Widen, SoftCap, Route, RouteInGroups, RunExperts, Mul,
                    SigmoidAndMul, Greedy, AddLowRank>;

// One step of a program.
struct Step {
  int64_t kind;  // its place in `Steps`
  const void* what;
  ORCINUS_FIELDS(Step, kind, what)
};

}  // namespace orcinus
