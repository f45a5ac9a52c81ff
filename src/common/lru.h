#pragma once

#include <list>
#include <unordered_map>
#include <utility>

namespace fusewise {

/// A map of bounded size. Adding to a full map drops the least recently used entry. Not
/// thread-safe.
template <typename Key, typename Value, typename Hash = std::hash<Key>>
class LruMap {
 public:
  explicit LruMap(std::size_t capacity) : capacity_(capacity) {}

  /// Returns the value and marks it as most recently used, or null if there is none. The pointer is
  /// valid until the next add().
  Value* find(const Key& key) {
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->second;
  }

  /// Adds an entry and returns the key's value. If the key already has a value, that one stays.
  Value& add(const Key& key, Value value) {
    if (Value* older = find(key)) return *older;
    if (entries_.size() == capacity_) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
    entries_.emplace_front(key, std::move(value));
    index_.emplace(key, entries_.begin());
    return entries_.front().second;
  }

  std::size_t size() const { return entries_.size(); }

 private:
  using Entries = std::list<std::pair<Key, Value>>;  // most recently used first
  std::size_t capacity_;
  Entries entries_;
  std::unordered_map<Key, typename Entries::iterator, Hash> index_;
};

}  // namespace fusewise
