// What Python must know of the library: where fields lie, what numbers mean, and what functions take.
//
// Python spells all of this, too. So that the two cannot disagree, the library tells it as text, and
// Python compares that with its own when it loads the library (`kernels/native/layout.py`).

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

// Defines a function that Python calls, and beside it one that returns the function's own declaration.
#define ORCINUS_EXPORT(Result, name, ...)                                                     \
  extern "C" const char* orcinus_##name##_declaration() { return #Result "(" #__VA_ARGS__ ")"; } \
  extern "C" Result orcinus_##name(__VA_ARGS__)

// Names all fields of the struct that it is in. One that is left out is missed by Python.
#define ORCINUS_FIELDS(Struct, ...)          \
  static constexpr const char* kName = #Struct; \
  void tell(orcinus::Layout& layout) const { layout.tell(*this, #__VA_ARGS__, __VA_ARGS__); }

namespace orcinus {

// The text: a line "name: value" for each number, each struct and each of its fields. A struct that is
// reached twice is told twice.
class Layout {
 public:
  template <class Number>
  void tell_number(const char* enumeration, const char* name, Number number) {
    add(enumeration, name, std::to_string(static_cast<int64_t>(number)));
  }

  // `names` are those of `fields`, as they stand in the source: with ", " between.
  template <class Struct, class... Fields>
  void tell(const Struct& whole, std::string_view names, const Fields&... fields) {
    add(Struct::kName, "", std::to_string(sizeof whole) + " bytes");
    (tell_field(whole, next_of(names), fields), ...);
  }

  // Tells what Python knows of a type: a struct's fields, nothing of others.
  template <class T>
  void tell_type() {
    if constexpr (requires { T::kName; }) T{}.tell(*this);
  }

  const std::string& text() const { return text_; }

 private:
  template <class Struct, class Field>
  void tell_field(const Struct& whole, std::string_view name, const Field& field) {
    const auto offset = reinterpret_cast<const char*>(&field) - reinterpret_cast<const char*>(&whole);
    add(Struct::kName, name, name_of<Field>() + " at " + std::to_string(offset));
    tell_type<std::remove_cv_t<std::remove_pointer_t<Field>>>();
  }

  template <class T>
  static std::string name_of() {
    if constexpr (std::is_pointer_v<T>) {
      return "pointer";
    } else if constexpr (std::is_array_v<T>) {
      return std::to_string(std::extent_v<T>) + " x " + name_of<std::remove_extent_t<T>>();
    } else if constexpr (std::is_enum_v<T>) {
      return name_of<std::underlying_type_t<T>>();
    } else if constexpr (std::is_integral_v<T>) {
      return "int" + std::to_string(8 * sizeof(T));
    } else if constexpr (std::is_floating_point_v<T>) {
      return "float" + std::to_string(8 * sizeof(T));
    } else {
      return T::kName;
    }
  }

  // Adds "whole.part: value", or "whole: value". Out of line, for it is called for every field.
  [[gnu::noinline]] void add(const char* whole, std::string_view part, const std::string& value) {
    text_.append(whole).append(part.empty() ? "" : ".").append(part).append(": ").append(value);
    text_ += '\n';
  }

  static std::string_view next_of(std::string_view& names) {
    const std::string_view next = names.substr(0, names.find(','));
    names.remove_prefix(std::min(names.size(), next.size() + 2));
    return next;
  }

  std::string text_;
};

}  // namespace orcinus
