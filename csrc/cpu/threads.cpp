#include <atomic>
#include <cfenv>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/threads.h"

namespace ngn {

TeamLauncher team_launcher = nullptr;

namespace {

// Work for threads that must round, and treat subnormal numbers, as the calling thread does.
struct Work {
  void (*run)(void*);
  void* data;
  std::fenv_t environment;
};

void run_as_the_caller(void* data) {
  const Work& work = *static_cast<Work*>(data);
  std::fenv_t own;
  std::fegetenv(&own);
  std::fesetenv(&work.environment);
  work.run(work.data);
  std::fesetenv(&own);
}

}  // namespace

void run_team(void (*run)(void*), void* run_data, int threads) {
  if (threads <= 1) return run(run_data);
  Work shared{run, run_data, {}};
  std::fegetenv(&shared.environment);
  const auto work = run_as_the_caller;
  void* const data = &shared;
  if (team_launcher) {
    team_launcher(work, data, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(threads));
    try {
      for (int i = 1; i < threads; ++i) others.emplace_back(work, data);
    } catch (const std::system_error&) {
      // The threads that did start do the others' parts.
    }
    work(data);
    for (auto& other : others) other.join();
  }
}

int thread_slot() {
  static std::atomic<int> next{0};
  thread_local const int slot = next.fetch_add(1);
  return slot;
}

}  // namespace ngn
