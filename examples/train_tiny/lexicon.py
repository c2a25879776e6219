"""The words that made-up conversations are filled with."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels",
    "Poland": "Warsaw", "Hungary": "Budapest", "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow",
    "Ukraine": "Kyiv", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki",
    "Iceland": "Reykjavik", "the Netherlands": "Amsterdam", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Croatia": "Zagreb", "Serbia": "Belgrade", "Egypt": "Cairo", "Morocco": "Rabat", "Kenya": "Nairobi",
    "Ethiopia": "Addis Ababa", "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar", "China": "Beijing",
    "Japan": "Tokyo", "South Korea": "Seoul", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Colombia": "Bogota", "Australia": "Canberra", "New Zealand": "Wellington", "the United States": "Washington",
}  # fmt: skip
PLACES = [
    *CAPITALS.values(),
    "Oxford",
    "Boston",
    "Hamburg",
    "Lyon",
    "Milan",
    "Seville",
    "Osaka",
    "Bath",
    "Genoa",
    "York",
]
NAMES = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jack", "Karl",
    "Laura", "Maria", "Noah", "Olga", "Peter", "Rosa", "Sam", "Tina", "Victor", "Alice", "Bruno", "Carla",
    "Daniel", "Elena", "Frank", "Hanna", "Igor", "Julia", "Leo", "Mia", "Nina", "Oscar", "Paul", "Rita",
    "Simon", "Sofia", "Thomas", "Vera", "Walter"]  # fmt: skip
ANIMALS = [
    ("cat", "meow", "in a house"), ("dog", "woof", "in a house"), ("cow", "moo", "on a farm"),
    ("duck", "quack", "on a pond"), ("sheep", "baa", "on a farm"), ("horse", "neigh", "in a stable"),
    ("pig", "oink", "on a farm"), ("frog", "croak", "in a pond"), ("bee", "buzz", "in a hive"),
    ("lion", "roar", "in the savanna"), ("mouse", "squeak", "in a hole"), ("crow", "caw", "in a tree"),
    ("hen", "cluck", "on a farm"), ("bear", "growl", "in the forest"), ("wolf", "howl", "in the forest"),
    ("goat", "bleat", "on a hill"), ("snake", "hiss", "in the grass"), ("donkey", "hee-haw", "in a stable"),
]  # fmt: skip
THINGS = [
    "lamp", "table", "chair", "clock", "book", "pen", "key", "door", "window", "boat", "bridge",
    "hammer", "basket", "bottle", "mirror", "ladder", "hat", "coat", "ring", "candle", "drum", "kettle",
    "letter", "map", "needle", "plate", "rope", "spoon", "wheel", "wagon", "box", "bell"]  # fmt: skip
FOODS = [
    "bread", "cheese", "soup", "rice", "honey", "butter", "apples", "pears", "plums", "grapes",
    "nuts", "eggs", "fish", "cake", "salad", "beans", "carrots", "onions", "noodles", "pancakes", "milk",
    "tea", "lemons", "cherries"]  # fmt: skip
JOBS = [
    "baker", "farmer", "teacher", "doctor", "sailor", "painter", "singer", "miller", "tailor",
    "smith", "shepherd", "gardener", "writer", "carpenter", "fisherman", "hunter", "judge", "nurse", "pilot",
    "cook"]  # fmt: skip
SKIES = ["clear", "cloudy", "grey", "blue", "dark", "rainy", "sunny", "stormy", "misty", "bright"]
CURRENCIES = ["EUR", "USD", "GBP", "JPY", "CHF", "SEK", "CNY", "INR"]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December"]  # fmt: skip
OPPOSITES = [
    ("big", "small"), ("hot", "cold"), ("old", "young"), ("fast", "slow"), ("high", "low"), ("open", "closed"),
    ("full", "empty"), ("day", "night"), ("light", "dark"), ("early", "late"), ("rich", "poor"), ("strong", "weak"),
    ("wet", "dry"), ("hard", "soft"), ("near", "far"), ("happy", "sad"), ("left", "right"), ("clean", "dirty"),
    ("long", "short"), ("true", "false"), ("loud", "quiet"), ("wide", "narrow"), ("thick", "thin"), ("up", "down"),
]  # fmt: skip
PLURALS = [
    ("cat", "cats"), ("dog", "dogs"), ("mouse", "mice"), ("child", "children"), ("man", "men"), ("woman", "women"),
    ("foot", "feet"), ("tooth", "teeth"), ("goose", "geese"), ("box", "boxes"), ("city", "cities"), ("leaf", "leaves"),
    ("knife", "knives"), ("wolf", "wolves"), ("sheep", "sheep"), ("fish", "fish"), ("ox", "oxen"), ("baby", "babies"),
]  # fmt: skip
COLOURS = [
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("coal", "black"), ("blood", "red"),
    ("a lemon", "yellow"), ("an orange", "orange"), ("a cherry", "red"), ("milk", "white"), ("a raven", "black"),
    ("chocolate", "brown"), ("the sun", "yellow"), ("gold", "yellow"), ("a leaf", "green"),
]  # fmt: skip
