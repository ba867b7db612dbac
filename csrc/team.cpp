#include <atomic>
#include <thread>
#include <vector>

#include "engine.h"

namespace ngn {

TeamLauncher team_launcher = nullptr;

void run_team(void (*work)(void*), void* data, int threads) {
  if (threads <= 1) {
    work(data);
  } else if (team_launcher) {
    team_launcher(work, data, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, data);
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
