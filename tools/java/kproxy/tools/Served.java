package kproxy.tools;

import java.io.DataInputStream;
import java.io.IOException;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.stream.Collectors;

/**
 * Which versions of which API one release of Kafka serves, whichever release it is: a line "key lowest highest listeners"
 * for each API that has a stable version. Everything is found by name, so that these lines run with jars from 0.8 on.
 *
 * <p>Listeners exist since 2.8; before, "broker" stands there.
 */
public final class Served {
    private static final String PROTOCOL = "org.apache.kafka.common.protocol.";
    private static final String BROKER = "broker";

    public static void main(String[] args) throws Exception {
        if (exists("kafka.api.RequestKeys$")) ofScala();
        else if (hasMethod(keys(), "oldestVersion")) ofApiKeys();
        else ofProtocol();
    }

    /** 0.11 and newer: the enum knows the versions, since 2.8 the listeners, since 3.5 which version is unstable. */
    private static void ofApiKeys() throws ReflectiveOperationException {
        for (Object api : keys().getEnumConstants()) {
            if (hasField(keys(), "isEnabled") && !field(keys(), "isEnabled").getBoolean(api)) continue; // Raft in 2.7
            short lowest = (short) call(api, "oldestVersion");
            short highest = hasMethod(keys(), "latestVersion", boolean.class)
                ? (short) keys().getMethod("latestVersion", boolean.class).invoke(api, false)
                : (short) call(api, "latestVersion");
            String listeners = BROKER;
            if (hasField(keys(), "messageType")) {
                listeners = ((Collection<?>) call(field(keys(), "messageType").get(api), "listeners")).stream()
                    .map(listener -> listener.toString().toLowerCase(Locale.ROOT)).sorted().collect(Collectors.joining(","));
            }
            if (!listeners.isEmpty()) print(field(keys(), "id").getShort(api), lowest, highest, listeners);
        }
    }

    /** 0.9 and 0.10: the schemas of all requests, by key and version; null for a version that is not served by them. */
    private static void ofProtocol() throws ReflectiveOperationException {
        Object[][] requests = (Object[][]) field(Class.forName(PROTOCOL + "Protocol"), "REQUESTS").get(null);
        for (Object api : keys().getEnumConstants()) {
            short key = field(keys(), "id").getShort(api);
            List<Object> versions = Arrays.asList(requests[key]);
            int lowest = 0;
            while (lowest < versions.size() && versions.get(lowest) == null) lowest++;
            if (lowest == versions.size() || versions.subList(lowest, versions.size()).contains(null))
                throw new IllegalStateException(api + ": the versions are no range");
            print(key, lowest, versions.size() - 1, BROKER);
        }
    }

    /**
     * 0.8: the broker's own Scala requests. It serves the keys that KafkaApis names, from version 0, as no request has a
     * lowest version, to the CurrentVersion of the request that the key's reader makes.
     */
    private static void ofScala() throws ReflectiveOperationException, IOException {
        Class<?> type = Class.forName("kafka.api.RequestKeys$");
        Object keys = field(type, "MODULE$").get(null);
        Set<String> handled = names(Class.forName("kafka.server.KafkaApis", false, type.getClassLoader()));
        for (Method named : type.getMethods()) {
            if (named.getReturnType() != short.class || !handled.contains(named.getName())) continue;
            short key = (short) named.invoke(keys);
            Object reader = type.getMethod("deserializerForKey", short.class).invoke(keys, key);
            List<String> requests = names(reader.getClass()).stream()
                .filter(name -> name.matches("kafka/api/\\w+Request\\$")).collect(Collectors.toList());
            if (requests.size() != 1) throw new IllegalStateException(named.getName() + ": read by " + requests);
            Class<?> request = Class.forName(requests.get(0).replace('/', '.'));
            print(key, 0, (short) call(field(request, "MODULE$").get(null), "CurrentVersion"), BROKER);
        }
    }

    private static void print(int key, int lowest, int highest, String listeners) {
        if (lowest <= highest) System.out.println(key + " " + lowest + " " + highest + " " + listeners);
    }

    /** The names in the class's constant pool: whatever its code refers to is among them. */
    private static Set<String> names(Class<?> type) throws IOException {
        Set<String> names = new HashSet<>();
        String file = "/" + type.getName().replace('.', '/') + ".class";
        try (DataInputStream in = new DataInputStream(type.getResourceAsStream(file))) {
            in.skipBytes(8); // magic number, version
            int count = in.readUnsignedShort();
            for (int index = 1; index < count; index++) {
                int tag = in.readUnsignedByte();
                switch (tag) {
                    case 1: names.add(in.readUTF()); break;
                    case 3: case 4: case 9: case 10: case 11: case 12: in.skipBytes(4); break;
                    case 5: case 6: in.skipBytes(8); index++; break; // a long or a double takes two places
                    case 7: case 8: in.skipBytes(2); break;
                    default: throw new IllegalStateException(type + ": a constant with tag " + tag);
                }
            }
        }
        return names;
    }

    private static Class<?> keys() throws ClassNotFoundException {
        return Class.forName(PROTOCOL + "ApiKeys");
    }

    private static boolean exists(String name) {
        try {
            Class.forName(name);
            return true;
        } catch (ClassNotFoundException e) {
            return false;
        }
    }

    private static boolean hasMethod(Class<?> type, String name, Class<?>... parameters) {
        return Arrays.stream(type.getMethods())
            .anyMatch(m -> m.getName().equals(name) && Arrays.equals(m.getParameterTypes(), parameters));
    }

    private static boolean hasField(Class<?> type, String name) {
        return Arrays.stream(type.getFields()).anyMatch(field -> field.getName().equals(name));
    }

    private static Field field(Class<?> type, String name) throws ReflectiveOperationException {
        return type.getField(name);
    }

    private static Object call(Object target, String name) throws ReflectiveOperationException {
        Method method = target.getClass().getMethod(name);
        method.setAccessible(true);
        return method.invoke(target);
    }
}
