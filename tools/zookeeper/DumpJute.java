package kproxy.tools;

import java.io.IOException;
import java.io.PrintStream;
import java.lang.reflect.Constructor;
import java.lang.reflect.Field;
import java.lang.reflect.ParameterizedType;
import java.lang.reflect.Proxy;
import java.lang.reflect.Type;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.jar.JarFile;
import org.apache.jute.OutputArchive;
import org.apache.jute.Record;

/**
 * Writes the layouts of ZooKeeper's records as JSON, as the records themselves serialize: each is filled, and serialized
 * into an archive that notes the calls. Also the numbers of operations, errors, events and modes.
 *
 * Arguments: the path of zookeeper-jute's jar, and the path to write to.
 */
public final class DumpJute {
    private static final List<String> PACKAGES =
        List.of("org/apache/zookeeper/data/", "org/apache/zookeeper/proto/", "org/apache/zookeeper/txn/");

    public static void main(String[] arguments) throws Exception {
        Map<String, String> records = new TreeMap<>();
        try (JarFile jar = new JarFile(arguments[0])) {
            for (var entries = jar.entries(); entries.hasMoreElements();) {
                String name = entries.nextElement().getName();
                if (name.endsWith(".class") && PACKAGES.stream().anyMatch(name::startsWith)) {
                    Class<?> type = Class.forName(name.replace('/', '.').substring(0, name.length() - ".class".length()));
                    records.put(type.getSimpleName(), layout((Record) filled(type)));
                }
            }
        }
        Map<String, String> operations = new TreeMap<>();
        for (Field field : Class.forName("org.apache.zookeeper.ZooDefs$OpCode").getFields()) {
            operations.put(field.getName(), String.valueOf(field.getInt(null)));
        }
        try (PrintStream out = new PrintStream(arguments[1], "UTF-8")) {
            out.println("{\"records\": " + object(records) + ",");
            out.println("\"operations\": " + object(operations) + ",");
            out.println("\"errors\": " + object(numbers("KeeperException$Code", "intValue")) + ",");
            out.println("\"event_types\": " + object(numbers("Watcher$Event$EventType", "getIntValue")) + ",");
            out.println("\"event_states\": " + object(numbers("Watcher$Event$KeeperState", "getIntValue")) + ",");
            out.println("\"create_modes\": " + object(numbers("CreateMode", "toFlag")) + ",");
            out.println("\"watch_modes\": " + object(numbers("AddWatchMode", "getMode")) + "}");
        }
    }

    private static Map<String, String> numbers(String type, String method) throws Exception {
        Map<String, String> numbers = new TreeMap<>();
        for (Object constant : Class.forName("org.apache.zookeeper." + type).getEnumConstants()) {
            numbers.put(((Enum<?>) constant).name(), constant.getClass().getMethod(method).invoke(constant).toString());
        }
        return numbers;
    }

    /** The fields of a record in the order of the wire, each as [name, type]; "[]" before a type means a vector. */
    private static String layout(Record record) throws IOException {
        List<String> fields = new ArrayList<>();
        String[] vector = {null};
        int[] depth = {0};
        OutputArchive archive = (OutputArchive) Proxy.newProxyInstance(
            DumpJute.class.getClassLoader(), new Class<?>[] {OutputArchive.class}, (proxy, method, given) -> {
                String name = method.getName();
                String tag = given.length > 0 ? String.valueOf(given[given.length - 1]) : "";
                switch (name) {
                    case "startRecord" -> {
                        if (depth[0]++ > 0) {
                            throw new IllegalStateException("a record within " + record.getClass());
                        }
                    }
                    case "endRecord" -> depth[0]--;
                    case "startVector" -> vector[0] = tag;
                    case "endVector" -> vector[0] = null;
                    default -> {
                        String type = name.substring("write".length());
                        type = type.equals("Record") ? given[0].getClass().getSimpleName() : type.toLowerCase();
                        tag = vector[0] != null ? vector[0] : tag;
                        fields.add("[\"" + tag + "\", \"" + (vector[0] != null ? "[]" : "") + type + "\"]");
                    }
                }
                return null;
            });
        record.serialize(archive, "");
        return "[" + String.join(", ", fields) + "]";
    }

    /** An instance with no field null, and one element in each vector. */
    private static Object filled(Class<?> type) throws Exception {
        Constructor<?> constructor = type.getDeclaredConstructor();
        constructor.setAccessible(true);
        Object record = constructor.newInstance();
        for (Field field : type.getDeclaredFields()) {
            field.setAccessible(true);
            if (!field.getType().isPrimitive() && !java.lang.reflect.Modifier.isStatic(field.getModifiers())) {
                field.set(record, value(field.getGenericType()));
            }
        }
        return record;
    }

    private static Object value(Type type) throws Exception {
        if (type instanceof ParameterizedType vector) {
            return List.of(value(vector.getActualTypeArguments()[0]));
        }
        if (type == String.class) {
            return "";
        }
        if (type == byte[].class) {
            return new byte[0];
        }
        return filled((Class<?>) type);
    }

    private static String object(Map<String, String> values) {
        List<String> lines = new ArrayList<>();
        values.forEach((name, value) -> lines.add("\"" + name + "\": " + value));
        return "{\n  " + String.join(",\n  ", lines) + "\n}";
    }
}
