// The threads that share a pass: OpenMP's own where the process has loaded it.
#pragma once

namespace ngn {

// Starts threads that all run work(data), as GOMP_parallel does.
using TeamLauncher = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern TeamLauncher team_launcher;

void run_team(void (*work)(void*), void* data, int threads);

// A small number that stays the same for a thread as long as it exists.
int thread_slot();

}  // namespace ngn
